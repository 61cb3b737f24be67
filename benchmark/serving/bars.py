"""What LAPS has to reach on each workload: against the best stock policy of a figure, or against fcfs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmark.rig.piece import Figure
from benchmark.serving.compare import Compared
from benchmark.serving.variants import FCFS, LAPS, STOCK


@dataclass(frozen=True)
class Bar:
    """One figure and what its ratio may be."""

    label: str
    path: tuple[str, ...]
    most: float | None = None
    least: float | None = None
    against: str | None = None
    """A variant; None = the stock policy that is best in this figure."""


def bars(workload: str) -> list[Bar]:
    """Of a workload of ``benchmark.serve``."""
    # Where prompts of all lengths are mixed, or most are short, there is less to gain for the short ones.
    even = workload in ("lmsys", "mooncake", "turns")
    # Their long prompts are few among much that is shorter, which goes first.
    yields = workload in ("bursty", "lmsys", "whale", "turns")
    return [
        Bar("short P90 TTFT", ("short", "p90_ms"), most=0.8 if even else 0.5),
        Bar("mean TTFT", ("mean_ms",), most=1.0),
        Bar("mean slowdown", ("slowdown_mean",), most=1.0),
        Bar("long P90 TTFT", ("long", "p90_ms"), most=1.25 if yields else 1.0, against=FCFS),
        Bar("requests/s", ("requests_per_s",), least=0.98),
    ]


def judged(compared: Compared, wanted: Iterable[Bar]) -> list[Figure]:
    """LAPS's ratios with their bars; none where LAPS or what it is judged against was not run."""
    figures = []
    for bar in wanted:
        base = bar.against or best(compared, bar.path, most=bar.least is not None)
        if base is None or not {base, LAPS} <= compared.answers.keys():
            continue
        found = compared.ratio(LAPS, base, *bar.path)
        if found is not None:
            of = base if bar.against else f"{base}, the best of stock"
            figures.append(Figure.of(f"{bar.label}, {LAPS} / {of}", found, most=bar.most, least=bar.least))
    return figures


def best(compared: Compared, path: Sequence[str], *, most: bool) -> str | None:
    """The stock policy with the best median of a figure; None where none was run."""
    medians = {n: statistics.median(compared.values(n, *path)) for n in STOCK if n in compared.answers}
    known = {n: m for n, m in medians.items() if not math.isnan(m)}
    pick: Callable[..., str] = max if most else min
    return pick(known, key=known.__getitem__) if known else None
