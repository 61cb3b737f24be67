"""Public traces on an emulated server, stock and LAPS, and the predictions of laps-plan for the same arrivals.

The planner uses the shipped profile with its assumed host times, and no measurement of this machine. ``--keep`` writes
the figures to the file from which the planner reports its accuracy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laps_plan.plan.words import ACCURACY
from laps_plan.profile import Profile

from benchmark.fidelity.compare import Accuracy, Simulator, round_of
from benchmark.results import Command, Namespace, Parser, Piece
from benchmark.results.bars import PLANNED
from benchmark.rig import EMULATED, FCFS, LAPS, SPF, Device, devices
from benchmark.serve import command as serve
from benchmark.serve.compare import Compared

TRACES = ("azure", "code", "lmsys")
PLANS = (FCFS, LAPS)
"""Policies whose predictions are shown."""
LONGEST = 16384
"""Longest prompt (tokens)."""
BARS = {"short P90": PLANNED, "long P90": None}


def options(p: Parser) -> None:
    p.add_argument("--keep", action="store_true", help="make laps-plan report these figures")


def run(args: Namespace) -> Iterator[tuple[Piece, Path]]:
    """Yield the piece of ``benchmark.serve`` for each trace, then a piece with all predictions."""
    out: Path = args.out
    words = ["--device", EMULATED + devices.H200, "--workload", ",".join(TRACES), "--longest", str(LONGEST)]
    words += ["--variants", ",".join((FCFS, SPF, LAPS)), "--rounds", str(args.rounds), "--seconds", str(args.seconds)]
    asked = serve.COMMAND.parse([*words, "--seed", str(args.seed), "--out", str(out)])
    seen: list[Compared] = []
    yield from serve.run(asked, done=seen.append)
    device: Device = asked.device
    simulator = Simulator(Profile.load(device.laps["profile"]), device.chunk, device.knobs)
    what = f"{device.what}; {asked.utilisation:.0%} of its capacity, {args.rounds} times {args.seconds:g} s, one server"
    piece = Piece("planned", "The planner against emulated servers", f"On {what}.", args.seed)
    cases: list[dict[str, Any]] = []
    for trace, compared in zip(TRACES, seen, strict=True):
        one = predicted(compared, simulator, args.seed)
        piece.figures += one.ratios(f"{trace}, {{policy}}, {{key}}: planned / emulated", BARS)
        piece.tables.append(one.table(f"{trace}: TTFT in ms, emulated / planned", keys=tuple(BARS)))
        cases += [
            {"trace": trace, "policy": policy, "figure": key, "planned_ms": 1e3 * one.simulated.median(policy, key),
             "measured_ms": 1e3 * one.measured.median(policy, key)}
            for policy in PLANS
            for key in BARS
        ]  # fmt: skip
    if args.keep:
        ACCURACY.write_text(json.dumps({"what": what, "cases": cases}, indent=1) + "\n")
    piece.data["cases"] = cases
    yield piece, out / "planned"


def predicted(compared: Compared, simulator: Simulator, seed: int) -> Accuracy:
    """Return the measured and simulated figures of a load. Raises ConnectionError if a request failed."""
    rounds = [[a.job for a in answers] for answers in compared.answers[FCFS]]
    seen = {name: [round_of(name, answers) for answers in compared.answers[name]] for name in PLANS}
    return simulator.compare(rounds, seen, seed)


COMMAND = Command(
    "benchmark.fidelity.planner", __doc__, run, options, out="", rounds=3, seed=1, seconds=40.0, every=True
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
