"""Quotes and replays of a real server against what was measured.

python -m benchmark.serve.quotes --device emulated:h200-qwen3-8b,slow=10
python -m benchmark.serve.quotes --device cpu --workloads poisson code --shares 0.5 0.85 --no-fcfs

Each load runs at shares of what the server's own latency model says fcfs can do. Of quotes the server's counters tell
how many first tokens came inside their interval. The requests of the last load are then replayed, from the server's
receipts or, where it keeps none, from what the client has measured: under the server's own policy, and under fcfs,
which a second server runs for comparison.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
from laps_core.latency.step import Coefficients
from laps_core.length import CLASSES, classify
from laps_core.receipts.quote import QuoteState
from laps_plan.profile import Profile
from laps_plan.replay.replay import HERE, Policy, config_of, policies, quantiles, replay
from laps_plan.replay.source import fetch
from laps_plan.sim.metrics import lone_s
from laps_plan.sim.variants import VARIANTS as SIMULATED
from laps_plan.sim.variants import run
from laps_plan.traffic import named
from laps_plan.traffic.job import Job
from laps_plan.traffic.recording import Head, Recorded, Recording
from laps_plan.traffic.streams import Trace

from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results.bars import Bar
from benchmark.results.piece import Figure, Piece, Table, count, parser
from benchmark.rig import devices, variants
from benchmark.rig.fleet import Fleet, command_line, flush, get_json
from benchmark.rig.progress import Progress
from benchmark.sim.quotes import INSIDE

OWN, OTHER = Bar(1.10, 0.90), Bar(1.15, 0.85)
"""Replayed over measured: under the server's own policy, under fcfs."""
SAMPLE = 300
PATIENCE_S = 60.0
FCFS = Policy(variants.FCFS, variants.FCFS)


@dataclass
class Rig:
    """Settings that all loads share."""

    fleet: Fleet
    prompts: Prompts
    longest: int
    seconds: float
    seed: int

    def status(self, target: Target) -> dict[str, Any]:
        """Status of the server, once it quotes. Raises RuntimeError where it does not."""
        said = get_json(target, "/laps_status") or {}
        if not said.get("quote"):
            raise RuntimeError("the server quotes nothing yet")
        return said

    def jobs(self, workload: str, share: float, status: dict[str, Any]) -> list[Job]:
        """Load at a share of the capacity."""
        state = msgspec.convert(status["quote"], QuoteState)
        profile = _profile(state.model)
        made = named.make(workload, named.Scale(self.longest, min(self.longest, 4 * state.chunk)))
        sample = made.sample(SAMPLE, random.Random(f"{self.seed} sample"))
        waiting = Trace([replace(job, at_s=0.0, cached=0, after=None) for job in sample])
        rate = run(SIMULATED["fcfs"], waiting, profile, chunk=state.chunk).rate
        alone = partial(_alone_s, profile, state.chunk)
        jobs = made.arrivals(named.Offer(share, self.seconds, rate, alone), random.Random(self.seed))
        # Without a decode server no prefix is kept.
        return [replace(job, cached=0, goes_on=False) for job in jobs]

    def send(self, target: Target, jobs: list[Job]) -> list[client.Answer]:
        """Send the load; answers in the order of the jobs."""
        flush(target)
        bodies = self.prompts.bodies(jobs, seed=self.seed)
        return asyncio.run(client.replay(target, jobs, bodies, PATIENCE_S))


def _profile(model: Coefficients) -> Profile:
    return Profile(name="server", source="its own model", coefficients=model)


def _alone_s(profile: Profile, chunk: int, new: int) -> float:
    return float(lone_s(profile, [new], [0], chunk)[0])


def _recording(answers: list[client.Answer], status: dict[str, Any]) -> Recording:
    state = msgspec.convert(status["quote"], QuoteState)
    slices = status["slices"]
    head = Head(
        model=state.model, config=status["config"], chunk=state.chunk, layers=state.layers,
        launch_s=slices["launch_ms"] / 1e3, overlap=status["overlap"],
    )  # fmt: skip
    done = [a for a in answers if a.ttft_s is not None]
    rows = [
        Recorded(
            arrival_ms=1e3 * a.sent_s, new_tokens=a.job.new, cls=classify(a.job.new, state.threshold),
            ttft_ms=1e3 * (a.ttft_s or 0.0),
        )
        for a in done
    ]  # fmt: skip
    return Recording(head, sorted(rows, key=lambda r: r.arrival_ms))


def _receipts(target: Target, seconds: float) -> Recording | None:
    """Recording by the server's own receipts; None where it keeps none."""
    try:
        return fetch(target.url, seconds)
    except ValueError:
        return None


def _counts(status: dict[str, Any]) -> Any:
    outcomes = status["quotes"]["outcomes"]
    return np.array([[outcomes[cls][side] for side in ("inside", "below", "above")] for cls in CLASSES])


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.serve.quotes", __doc__, "serve-quotes", seed=1, seconds=60.0, whole=True)
    devices.add_device(p)
    p.add_argument("--workloads", nargs="+", default=["poisson"], choices=list(named.OPEN))
    p.add_argument("--shares", nargs="+", type=float, default=[0.85], help="of the capacity (0.85)")
    p.add_argument("--longest", type=count, help="longest prompt (tokens; as the device has it)")
    p.add_argument("--no-fcfs", action="store_true", help="start no second server")
    args = p.parse_args(argv)
    device: devices.Device = args.device
    known = variants.BUILT_IN
    chosen = [known[variants.LAPS], *([] if args.no_fcfs else [known[variants.FCFS]])]
    longest = args.longest or device.longest
    prompts = Prompts(device.vocabulary, args.seed, longest, reuse=False, prefill_only=True)
    with command_line("quotes"):
        fleet = Fleet(device, device.chunk, chosen, False, args.out, prompts, Progress(), together=False)
        rig = Rig(fleet, prompts, longest, args.seconds, args.seed)
        with fleet:
            piece = _measure(rig, args)
    piece.leave(args.out, "benchmark.serve.quotes", argv, every=True)
    return 0


def _measure(rig: Rig, args: Any) -> Piece:
    target = rig.fleet.target(variants.LAPS)
    rows, figures = [], []
    for workload in args.workloads:
        for share in args.shares:
            before = rig.status(target)
            jobs = rig.jobs(workload, share, before)
            rig.fleet.say(f"{workload} at {share:.0%}: {len(jobs)} requests")
            begin = time.monotonic()
            answers = rig.send(target, jobs)
            after = rig.status(target)
            found = _counts(after) - _counts(before)
            inside, below, above = (found.sum(axis=0) / max(1, found.sum())).tolist()
            each = [f"{row[0] / row.sum():.1%}" if row.sum() else "-" for row in found]
            rows.append(
                (
                    f"{workload} {share:.0%}",
                    str(found.sum()),
                    f"{inside:.1%}",
                    *each,
                    f"{below:.1%}",
                    f"{above:.1%}",
                    str(after["quotes"]["beyond_bound"] - before["quotes"]["beyond_bound"]),
                )
            )
            figures.append(Figure.of(f"inside the interval, {rows[-1][0]}", inside, INSIDE))
    recording = _receipts(target, time.monotonic() - begin) or _recording(answers, after)
    recording.save(args.out / "recording.jsonl")
    heads = ("", "requests", "inside", "short", "long", "below", "above", "beyond the bound")
    tables = [Table("Quotes", heads, rows)]
    measured = [("replayed, here", recording, [r.ttft_ms for r in recording.requests], HERE, OWN)]
    if not args.no_fcfs:
        seen = _recording(rig.send(rig.fleet.target(variants.FCFS), jobs), after)
        measured.append(("replayed, fcfs", seen, [r.ttft_ms for r in seen.requests], FCFS.name, OTHER))
    own = next(p for p in policies(config_of(recording)) if p.name == HERE)
    replayed = {r.policy.name: quantiles(recording, r.ttft_ms) for r in replay(recording, [own, FCFS])}
    rows = []
    for title, seen, times, name, bar in measured:
        wanted = quantiles(seen, times)
        for cls in wanted:
            for q in ("p50", "p90"):
                is_ms, was_ms = replayed[name][cls][q], wanted[cls][q]
                rows.append((f"{title}, {cls} {q.upper()}", f"{was_ms:.1f}", f"{is_ms:.1f}", f"{is_ms / was_ms:.3f}"))
                figures.append(Figure.of(rows[-1][0] + " over measured", is_ms / was_ms, bar))
    tables.append(Table("Replays, ms", ("", "measured", "replayed", "ratio"), rows))
    text = f"One prefill server, {args.device.what}. Loads of {args.seconds:g} s."
    return Piece("serve-quotes", "Quotes and replays of a real server", text, args.seed, tables, figures)


if __name__ == "__main__":
    sys.exit(main())
