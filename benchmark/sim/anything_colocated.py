"""Random workloads on servers that prefill and decode, simulated on random devices.

    python -m benchmark.sim.anything_colocated [--workloads 200]

LAPS with its defaults is compared, for each workload and each figure, with the best of SGLang's settings whose P99
between tokens is no longer than that of LAPS (or the shortest), chosen in hindsight. The first tenth of each simulation
does not count, because the servers start idle.
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any

from laps_plan.plan.whole import DEFAULT, FIGURES, MORE, Question, Trials, best, stock, stock_as_smooth
from laps_plan.profile import Profile
from laps_plan.sim.serving import LAPS, Serving
from laps_plan.traffic.given import Traffic
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import log_uniform

from benchmark.results import Namespace, Piece
from benchmark.sim.anything import LOADS, add_ratios, arrivals, command, lengths, run_all
from benchmark.sim.colocated import LONG_S, SHORT_S, TBT_S
from benchmark.sim.rules import PROFILES

LONGEST, REQUESTS = 30_000, (400, 700)
STOCK = tuple(s for s in stock() if s.chunk in (512, 2048, 8192))
TBT = "between tokens, P99"
OVER = {
    **{name: "best of stock" for name in FIGURES if name not in MORE},
    "time for an answer": "best of stock", TBT: f"{DEFAULT.name} (stock as it is)",
}  # fmt: skip
"""Figures of LAPS, and the stock figure that each is divided by. Time for an answer: 1 / (answers/s)."""


def workload(seed: int) -> tuple[Trials, float]:
    """Return random requests with answers for a random device, and the load as a share of its capacity."""
    rng = random.Random(f"colocated {seed}")
    profile, load, draw = Profile.load(rng.choice(PROFILES)), rng.choice(LOADS), lengths(rng)
    shortest = rng.choice((1, 8, 32, 128))
    answers, burst = log_uniform(shortest, shortest * rng.choice((2, 8, 30))), rng.choice((1, 1, 4, 20))
    times = arrivals(rng, burst, rng.choice(REQUESTS))
    jobs = [Job(at_s, min(draw(rng), LONGEST), output=answers(rng)) for at_s in times]
    question, traffic = Question(profile, 1, SHORT_S, LONG_S, TBT_S), Traffic(jobs, "random")
    return Trials(question, traffic.at_rate(load * Trials(question, traffic).capacity)), load


def ratios(seed: int) -> dict[str, Any]:
    """Return a summary of a random workload, and the ratios of OVER; None if a workload lacks the class."""
    trials, load = workload(seed)
    laps, *others = [trials.row(s) for s in (Serving(LAPS), *STOCK)]
    smooth = stock_as_smooth(others, laps)

    def ratio(figure: str) -> float | None:
        mine, rival = laps.value(figure), best(smooth, figure).value(figure)
        return None if math.isnan(mine) or math.isnan(rival) or not rival else mine / rival

    jobs, default = trials.traffic.jobs, next(r for r in others if r.serving == DEFAULT)
    means = {name: sum(getattr(job, name) for job in jobs) / len(jobs) for name in ("new", "output")}
    return {
        "seed": seed, "profile": trials.question.profile.name, "load": load, **means,
        **{figure: ratio(figure) for figure in OVER if figure in FIGURES},
        "time for an answer": 1.0 / (ratio("answers/s") or 1.0),
        TBT: laps.tbt["p99"] / default.tbt["p99"] if default.tbt["p99"] > 0.0 else None,
    }  # fmt: skip


def measure(args: Namespace) -> Piece:
    found = run_all(ratios, args)
    text = (
        f"{len(found)} random workloads with answers on Qwen3-8B, 32B or 30B-A3B. LAPS is the same in all; of "
        f"{len(STOCK)} stock settings each figure of each workload has the best whose P99 between tokens is no longer "
        "than that of LAPS (or the shortest), chosen in hindsight. Below 1: LAPS is better."
    )
    name = "Workloads that nobody has chosen, servers that prefill and decode"
    piece = Piece("sim-anything-colocated", name, text, args.seed)
    add_ratios(piece, "All workloads with answers", found, OVER)
    piece.data = {"workloads": found}
    return piece


COMMAND = command("anything_colocated", __doc__, measure, 200)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
