"""Tables and ratios of a comparison, and LAPS's bars on each workload."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmark.results import bars
from benchmark.results.bars import Bar
from benchmark.results.metrics import KINDS, QUANTILES
from benchmark.results.piece import Figure, Table
from benchmark.results.rounds import ratio
from benchmark.rig.variants import FCFS, LAPS, SMALL, STOCK
from benchmark.serve.compare import GOAL, Compared, Points

RATIOS = {
    **{f"{kind} P{q} TTFT": (kind, f"p{q}_ms") for kind in KINDS for q in (50, 90)},
    "mean TTFT": ("mean_ms",),
    "mean slowdown": ("slowdown_mean",),
    "requests/s": ("requests_per_s",),
    "share within the SLO": ("goodput",),
}
"""Compared figures: name in the report -> path in a round's figures."""
OVER_FCFS = "long P90 TTFT"
"""The ratio judged against fcfs; all others are judged against the best stock policy in that figure."""


def number(value: float, digits: int = 0) -> str:
    """Return the number as text; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def results(compared: Compared, title: str) -> list[Table]:
    """Return a table of TTFT and throughput, and one of fairness and SLO."""
    ttft, fair = [], []
    for name in compared.answers:
        whole = compared.pooled(name)
        ttft.append((
            name, *(number(whole[k][f"p{q}_ms"]) for k in KINDS for q in QUANTILES),
            number(whole["mean_ms"]), number(whole["slowdown_mean"], 1),
            number(whole["requests_per_s"], 1), number(whole["tokens_per_s"]), str(whole["failed"]),
        ))  # fmt: skip
        rate = compared.goodput_per_s.get(name)
        fair.append((
            name, *(number(100 * whole[k]["goodput"], 1) for k in KINDS),
            *([] if not compared.goodput_per_s else [number(math.nan if rate is None else rate, 1)]),
            *(number(whole[k][f"slowdown_{q}"], 1) for k in KINDS for q in ("mean", "p90")),
            *(number(whole[k]["longest_wait_s"], 2) for k in KINDS),
        ))  # fmt: skip
    heads = (
        "variant", *(f"{k} P{q}" for k in KINDS for q in QUANTILES), "mean", "mean slowdown", "requests/s", "tokens/s",
        "failed",
    )  # fmt: skip
    note = (
        "TTFT in ms over the requests of all rounds, both classes in the means; rates are medians over rounds. Short: "
        "up to 256 new tokens."
    )
    fair_heads = (
        "variant", *(f"{k} in time %" for k in KINDS), *(["goodput /s"] if compared.goodput_per_s else []),
        *(f"{k} slowdown {q}" for k in KINDS for q in ("mean", "P90")), *(f"longest {k} wait s" for k in KINDS),
    )  # fmt: skip
    factor = compared.slo.factor
    fair_note = (
        f"In time: TTFT at most {factor:g} times that of a prompt of so many new tokens alone. Slowdown: TTFT over "
        "that lone TTFT. Wait: TTFT less it."
    )
    if compared.goodput_per_s:
        fair_note += f" Goodput: highest offered requests/s that keep {100 * GOAL:.0f}% of each class in time."
    return [Table(title, heads, ttft, note), Table("In time, slowdown, longest wait", fair_heads, fair, fair_note)]


def ratios(compared: Compared, base: str) -> tuple[list[Table], list[Figure]]:
    """Return every variant's ratios over ``base``: medians of per-round ratios."""
    rows, found = [], []
    for name in compared.answers:
        if name == base:
            continue
        cells = []
        for label, path in RATIOS.items():
            r = compared.ratio(name, base, *path)
            cells.append("-" if r is None else f"{r} {r.verdict}")
            if r is not None:
                found.append(Figure.of(f"{label}, {name} / {base}", r))
        rows.append((name, *cells))
    if not rows:
        return [], []
    note = (
        "Median of per-round ratios [interval for that median] and what it supports: more, less, or not shown (the "
        "interval holds 1, or has less than 90% confidence)."
    )
    return [Table(f"Ratios over {base}", ("variant", *RATIOS), rows, note)], found


def wanted(workload: str) -> dict[str, Bar]:
    """Return the bars of LAPS's ratios on a workload of ``benchmark.serve``, by their names in RATIOS."""
    # With prompts of all lengths, or mostly short ones, short requests have less to gain.
    even = workload in ("lmsys", "mooncake", "turns")
    # The few long prompts of these wait for many shorter ones.
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
    figures = []
    for label, bar in wanted(workload).items():
        path = RATIOS[label]
        base = FCFS if label == OVER_FCFS else best(compared, path, most=math.isinf(bar.most))
        if base is None or not {base, LAPS} <= compared.answers.keys():
            continue
        found = compared.ratio(LAPS, base, *path)
        if found is not None:
            of = base if label == OVER_FCFS else f"{base}, the best of stock"
            figures.append(Figure.of(f"{label}, {LAPS} / {of}", found, bar))
    return figures


def best(compared: Compared, path: Sequence[str], *, most: bool) -> str | None:
    """Return the stock policy with the best median of a figure; None if none was run."""
    medians = {n: statistics.median(compared.values(n, *path)) for n in (*STOCK, SMALL) if n in compared.answers}
    known = {n: m for n, m in medians.items() if not math.isnan(m)}
    return (max if most else min)(known, key=known.__getitem__) if known else None


def closed(points: Points, names: Sequence[str], base: str) -> tuple[list[Table], list[Figure], dict[str, Any]]:
    """Return tables, ratios over ``base`` and raw figures of closed loops."""
    tables, compared = [], []
    for key, title in (("requests_per_s", "requests/s"), ("p50_ms", "TTFT P50 (ms)"), ("p90_ms", "TTFT P90 (ms)")):
        rows = [(str(n), *(f"{statistics.median(at[name][key]):.1f}" for name in names)) for n, at in points.items()]
        tables.append(Table(f"Closed loop: {title}", ("clients", *names), rows))
    for name in names:
        rates = {
            n: ratio(at[name]["requests_per_s"], at[base]["requests_per_s"]) for n, at in points.items() if name != base
        }
        bar = bars.CLOSED_WORST if (name, base) == (LAPS, FCFS) else None
        compared += [Figure.of(f"requests/s, {n} clients, {name} / {base}", r, bar) for n, r in rates.items()]
        if bar:
            top = max(r.median for r in rates.values())
            compared.append(Figure.of("requests/s at LAPS's best point", top, bars.CLOSED_BEST))
    return tables, compared, {"points": {str(n): at for n, at in points.items()}}
