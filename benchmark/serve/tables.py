"""Tables and ratios of a comparison, and LAPS's bars on each workload."""

from __future__ import annotations

import math
from itertools import starmap

from benchmark.results import FAILED, KINDS, QUANTILES, Bar, Column, Comparison, Figure, Table, bars, ttft_paths
from benchmark.rig import FCFS, LAPS, SMALL, STOCK
from benchmark.serve.compare import Compared, Points

RATIOS = {
    **{f"{name} TTFT": path for name, path in ttft_paths(50, 90).items()},
    "mean TTFT": ("mean_ms",),
    "mean slowdown": ("slowdown_mean",),
    "requests/s": ("requests_per_s",),
    "share within the SLO": ("goodput",),
}
"""Compared figures: name in the report -> path in a round's figures."""
OVER_FCFS = "long P90 TTFT"
"""Ratio that is judged against fcfs. All other ratios are judged against the best stock policy in that figure."""
RESULTS = (
    *starmap(Column, ttft_paths(*QUANTILES).items()),
    Column("mean", ("mean_ms",)),
    Column("mean slowdown", ("slowdown_mean",), ".1f"),
    Column("requests/s", ("requests_per_s",), ".1f"),
    Column("tokens/s", ("tokens_per_s",)),
    FAILED,
)
FAIR = (
    *(Column(f"{kind} in time %", (kind, "goodput"), ".1f", scale=100.0) for kind in KINDS),
    *(Column(f"{k} slowdown {q}", (k, f"slowdown_{q.lower()}"), ".1f") for k in KINDS for q in ("mean", "P90")),
    *(Column(f"longest {kind} wait s", (kind, "longest_wait_s"), ".2f") for kind in KINDS),
)


def results(compared: Compared, title: str) -> list[Table]:
    """Return a table of TTFT and throughput, and one of fairness and SLO."""
    pooled = Comparison({n: [compared.pooled(n)] for n in compared.answers})
    note = (
        "TTFT in ms over the requests of all rounds, both classes in the means; rates are medians over rounds. Short: "
        "up to 256 new tokens."
    )
    fair = (
        f"In time: TTFT at most {compared.slo.factor:g} times that of a prompt of so many new tokens alone. Slowdown: "
        "TTFT over that lone TTFT. Wait: TTFT less it."
    )
    second = pooled.table("In time, slowdown, longest wait", "variant", FAIR, fair)
    return [pooled.table(title, "variant", RESULTS, note), second]


def ratios(compared: Compared, base: str) -> tuple[list[Table], list[Figure]]:
    """Return every variant's ratios over ``base``: medians of per-round ratios."""
    rows, found, seen = [], [], compared.comparison
    for name in (name for name in compared.answers if name != base):
        made = [seen.figure(f"{label}, {name} / {base}", name, base, path) for label, path in RATIOS.items()]
        known = [f for f in made if not math.isnan(f.value)]
        cells = [f"{f.value:.3f} [{f.low:.3f}, {f.high:.3f}] {f.verdict}" if f in known else "-" for f in made]
        rows.append((name, *cells))
        found += known
    note = (
        "Median of per-round ratios [interval for that median] and what it supports: more, less, or not shown (the "
        "interval holds 1, or has less than 90% confidence)."
    )
    return [Table(f"Ratios over {base}", ("variant", *RATIOS), rows, note)] if rows else [], found


def wanted(workload: str) -> dict[str, Bar]:
    """Return the bars of LAPS's ratios on a workload of ``benchmark.serve``, by their names in RATIOS."""
    # With prompts of all lengths, or mostly short ones, short requests have less to gain.
    even = workload in ("lmsys", "mooncake", "turns")
    # The few long prompts of these workloads wait for many shorter prompts.
    yields = workload in ("bursty", "lmsys", "whale", "turns")
    return {
        "short P90 TTFT": bars.SHORT_P90_EVEN if even else bars.SHORT_P90,
        "mean TTFT": bars.NO_MORE,
        "mean slowdown": bars.NO_MORE,
        OVER_FCFS: bars.LONG_P90_YIELDS if yields else bars.NO_MORE,
        "requests/s": bars.THROUGHPUT,
    }


def judged(compared: Compared, workload: str) -> list[Figure]:
    """Return LAPS's ratios with their bars; none if LAPS or the policy it is judged against was not run."""
    figures, seen = [], compared.comparison
    for label, bar in wanted(workload).items():
        path = RATIOS[label]
        base = FCFS if label == OVER_FCFS else seen.best((*STOCK, SMALL), *path, most=math.isinf(bar.most))
        if base is None or not {base, LAPS} <= compared.answers.keys():
            continue
        of = base if label == OVER_FCFS else f"{base}, the best of stock"
        figures.append(seen.figure(f"{label}, {LAPS} / {of}", LAPS, base, path, bar))
    return [f for f in figures if not math.isnan(f.value)]


def closed(points: Points, base: str) -> tuple[list[Table], list[Figure]]:
    """Return tables of closed loops, and ratios over ``base``. Those of LAPS over fcfs have bars."""
    tables, compared, names = [], [], list(next(iter(points.values())).rounds)
    for key, title in (("requests_per_s", "requests/s"), ("p50_ms", "TTFT P50 (ms)"), ("p90_ms", "TTFT P90 (ms)")):
        rows = [[str(n), *(f"{at.median(name, key):.1f}" for name in names)] for n, at in points.items()]
        tables.append(Table(f"Closed loop: {title}", ("clients", *names), rows))
    for name in (name for name in names if name != base):
        rates = {n: at.ratio(name, base, "requests_per_s") for n, at in points.items()}
        bar = bars.CLOSED_WORST if (name, base) == (LAPS, FCFS) else None
        compared += [Figure.of(f"requests/s, {n} clients, {name} / {base}", r, bar) for n, r in rates.items()]
        if bar:
            top = max(r.median for r in rates.values())
            compared.append(Figure.of(f"requests/s at the best point of {name}", top, bars.CLOSED_BEST))
    return tables, compared
