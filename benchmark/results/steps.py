"""Steps of the report: one command each, and the pieces it writes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.results.piece import Piece
from benchmark.rig import EMULATED, H200, REPO, SMALL

LIMIT_S = 3600.0


@dataclass(frozen=True)
class Step:
    """One command of the report."""

    module: str
    args: str = ""
    """Separated by spaces."""
    pieces: tuple[str, ...] = ()
    """Pieces written, each into its own folder below the report's; empty: one piece with the step's name."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command."""
    gpu: bool = False
    """True if the step runs on a machine with a GPU only; elsewhere an earlier result is used."""


TRACES = ("emulated-azure", "emulated-code", "emulated-lmsys")
FLEETS = ((1, "32b", 2), (4, "8b", 20))
"""Servers, model, and slowdown of the emulated device. The slowdown keeps this machine's host work in proportion."""
REAL = f"--real --rounds 3 --seconds 15 --device {EMULATED}{H200}"
"""Options on emulated devices: otherwise three servers, a decode server, clients and a router starve on a few cores."""
AGENTS = (
    f"--workload agents --variants fcfs,{SMALL},laps --rounds 2 --seconds 80 --device {EMULATED}h200-qwen3-8b,slow=2"
)
GPU = (
    *("loads", "lone", "slices", "mixed", "code", "azure"),
    *("answers", "answers-tp2", "closed", "graphs", "agents", "latency", "ladder-0.5B", "ladder-7B"),
)
STEPS: dict[str, Step] = {
    "headline": Step("benchmark.serve.headline", pieces=("headline", "overload")),
    "closed": Step("benchmark.serve", "--workload closed --variants fcfs,laps --rounds 3 --concurrency 1 8 32"),
    "slices": Step("benchmark.serve.slices"),
    "router-echo": Step("benchmark.router", "--echo --rounds 3 --seconds 2"),
    "router-real": Step("benchmark.router", REAL),
    "router-two": Step("benchmark.router", f"{REAL} --laps-prefill --prefill 2"),
    "router-agents": Step("benchmark.router", "--agents --rounds 1 --seconds 80"),
    "colocated": Step("benchmark.colocated"),
    "sim-rules": Step("benchmark.sim.rules"),
    "sim-anything": Step("benchmark.sim.anything"),
    "sim-anything-colocated": Step("benchmark.sim.anything_colocated"),
    "sim-anything-fleet": Step("benchmark.sim.anything_fleet"),
    "sim-colocated": Step("benchmark.sim.colocated"),
    "sim-goodput": Step("benchmark.sim.goodput"),
    "sim-quotes": Step("benchmark.sim.quotes", "--profiles h200-qwen3-8b"),
    "sim-gpu": Step("benchmark.fidelity.gpu"),
    "emulated": Step("benchmark.fidelity.policies"),
    **{
        f"emulated-{n}-{model}": Step(
            "benchmark.fidelity.fleet", f"--device h200-qwen3-{model},slow={slow} --servers {n}"
        )
        for n, model, slow in FLEETS
    },
    "planned": Step("benchmark.fidelity.planner", "--rounds 2", pieces=(*TRACES, "planned")),
    "emulated-agents": Step("benchmark.serve", f"{AGENTS} --utilisation 0.7"),
    "emulated-agents-85": Step("benchmark.serve", f"{AGENTS} --utilisation 0.85"),
    "groups": Step("benchmark.fidelity.ranks"),
    "groups-agents": Step("benchmark.fidelity.ranks", "--workload agents --seconds 120"),
    "gpu": Step("benchmark.gpu", pieces=tuple(f"gpu-{n}" for n in GPU), gpu=True),
    # This module is part of the tests. Each server imports its modules itself, as in production.
    "faults": Step("warm", "faults --requests 3000", env={"PYTHONPATH": "test/support", "LAPS_COLD_SERVERS": "1"}),
}


def command(name: str, step: Step, folder: Path) -> list[str]:
    """Return the command of a step; ``folder`` is the report's."""
    out = folder if step.pieces else folder / name
    return ["-m", step.module, *step.args.split(), "--out", str(out)]


def run(name: str, step: Step, folder: Path, say: Callable[[str], None]) -> str | None:
    """Run a step, with its output in ``folder/logs``. Returns None, or the failure in one line."""
    log = folder / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = command(name, step, folder)
    say(f"{name}: python {' '.join(arguments)}")
    begin = time.monotonic()
    with log.open("w") as out:
        # On SIGTERM the command stops its servers itself.
        env = {**os.environ, **step.env}
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=REPO, env=env, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"took longer than {LIMIT_S:.0f} s"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
    say(f"{name}: {time.monotonic() - begin:.0f} s")
    if code:
        lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
        return f"ended with code {code}: {(lines or ['no output'])[-1].strip()[-200:]}"
    return None


@dataclass(frozen=True)
class Collected:
    """Pieces available for a page."""

    pieces: dict[str, tuple[Piece, Path]]
    """Pieces by name, with the folder of their pictures, in the order of the steps."""
    missing: dict[str, str]
    """Step or piece -> reason why it is missing."""

    def add(self, name: str, folder: Path, why: str) -> None:
        """Read a piece that a command has written, or that a page keeps. ``why``: reason if neither exists."""
        kept = folder / f"{name}.json"
        where = folder if kept.is_file() else folder / name
        try:
            self.pieces[name] = (Piece.read(kept if kept.is_file() else where), where)
        except FileNotFoundError:
            self.missing[name] = why
        except (OSError, ValueError, TypeError, KeyError) as e:
            self.missing[name] = f"its result cannot be read: {type(e).__name__}: {e}"


def collect(folder: Path, failed: Mapping[str, str], steps: Mapping[str, Step] = STEPS) -> Collected:
    """Return the pieces of all steps below ``folder``. A step that failed is missing, even if an older result is
    there."""
    found = Collected({}, dict(failed))
    for name, step in steps.items():
        for leaf in step.pieces or (name,) if name not in failed else ():
            words = " ".join(command(name, step, Path("out/report")))
            found.add(leaf, folder, f"not measured (python {words})")
    return found
