"""What LAPS has to reach on each workload: against the best stock policy of a figure, or against fcfs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark.results import bars
from benchmark.results.bars import Bar
from benchmark.results.piece import Figure
from benchmark.rig.variants import FCFS, LAPS, STOCK
from benchmark.suites.serve.compare import Compared


@dataclass(frozen=True)
class Wanted:
    """One figure and what its ratio may be."""

    label: str
    path: tuple[str, ...]
    bar: Bar
    against: str | None = None
    """A variant; None = the stock policy that is best in this figure."""


def wanted(workload: str) -> list[Wanted]:
    """Of a workload of ``benchmark.serve``."""
    # Where prompts of all lengths are mixed, or most are short, there is less to gain for the short ones.
    even = workload in ("lmsys", "mooncake", "turns")
    # Their long prompts are few among much that is shorter, which goes first.
    yields = workload in ("bursty", "lmsys", "whale", "turns")
    return [
        Wanted("short P90 TTFT", ("short", "p90_ms"), bars.SHORT_P90_EVEN if even else bars.SHORT_P90),
        Wanted("mean TTFT", ("mean_ms",), bars.NO_MORE),
        Wanted("mean slowdown", ("slowdown_mean",), bars.NO_MORE),
        Wanted("long P90 TTFT", ("long", "p90_ms"), bars.LONG_P90_YIELDS if yields else bars.NO_MORE, FCFS),
        Wanted("requests/s", ("requests_per_s",), bars.THROUGHPUT),
    ]


def judged(compared: Compared, workload: str) -> list[Figure]:
    """LAPS's ratios with their bars; none where LAPS or what it is judged against was not run."""
    figures = []
    for one in wanted(workload):
        base = one.against or best(compared, one.path, most=math.isinf(one.bar.most))
        if base is None or not {base, LAPS} <= compared.answers.keys():
            continue
        found = compared.ratio(LAPS, base, *one.path)
        if found is not None:
            of = base if one.against else f"{base}, the best of stock"
            figures.append(Figure.of(f"{one.label}, {LAPS} / {of}", found, one.bar))
    return figures


def best(compared: Compared, path: Sequence[str], *, most: bool) -> str | None:
    """The stock policy with the best median of a figure; None where none was run."""
    medians = {n: statistics.median(compared.values(n, *path)) for n in STOCK if n in compared.answers}
    known = {n: m for n, m in medians.items() if not math.isnan(m)}
    pick: Callable[..., str] = max if most else min
    return pick(known, key=known.__getitem__) if known else None
