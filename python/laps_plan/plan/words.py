"""The answer in words and tables."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

from laps_plan.plan.advice import GAIN, HARM, PAYS, RULE, SAME, TRADE
from laps_plan.plan.answer import Answer, Side
from laps_plan.plan.figures import COMPARED, PARTS, Change
from laps_plan.plan.setup import IN_TIME, LAPS
from laps_plan.plan.trials import STRETCHES
from laps_plan.table import Table

ACCURACY = Path(__file__).with_name("accuracy.json")
"""File with figures as planned and as measured, written by ``benchmark.fidelity.planner --keep``."""


def verdict(a: Answer) -> list[str]:
    """Return sentences that say what to run, and why."""
    best = a.advice.stock
    if a.advice.recommended:
        said = [f"LAPS is recommended. Against {best.name}, the best stock policy here: {ratios_text(a)}."]
    else:
        said = [f"LAPS is not shown to be better than stock {best.name}: not recommended. LAPS: {ratios_text(a)}."]
    said.append(f"Start each prefill server with: {a.advice.setup.flags()}")
    if a.advice.setup.pools:
        said.append("Start the router with: --enable-laps-alloc")
    if a.load > 1.0:
        said.append(
            f"More comes than {_servers(a.question.servers)} can do ({a.load:.2f} times as much): waits grow for as "
            "long as the traffic lasts, whatever the policy."
        )
    if a.hopeless > 0.01:
        said.append(f"{a.hopeless:.0%} of the requests are late even alone on an idle server: the objective is tight.")
    return said


def ratios_text(a: Answer) -> str:
    """Return the ratios of the advised LAPS setup to the best stock policy, as text."""
    change = a.advice.against[a.advice.stock.name]
    return ", ".join(f"{name} x {ratio}" for name, ratio in change.ratios.items()) or "too few requests to compare"


def _servers(n: int) -> str:
    return "1 server" if n == 1 else f"{n} servers"


def traffic(a: Answer) -> list[str]:
    """Return the traffic and the question, one sentence each."""
    jobs, q = a.traffic.jobs, a.question
    short = sum(job.kind == "short" for job in jobs) / len(jobs)
    new, cached = sum(job.new for job in jobs), sum(job.cached for job in jobs)
    return [
        f"{len(jobs):,} requests, {a.traffic.what}, at {a.traffic.rate:.3g} per second: {short:.1%} short (up to 256 "
        f"new tokens), {new / len(jobs):.0f} new and {cached / len(jobs):.0f} cached tokens on average.",
        *a.traffic.notes,
        f"{_servers(q.servers).capitalize()} of {q.profile.name} ({q.profile.source}); each can do "
        f"{a.capacity:.3g} requests per second of this traffic at most, so the load is {a.load:.2f}.",
        f"In time: first token within {1e3 * q.short_s:g} ms (short), {1e3 * q.long_s:g} ms (long).",
    ]


def side_by_side(a: Answer) -> Table:
    """Return the table of all setups on the whole traffic."""
    heads = ["", "short P50", "P90", "P99", "long P50", "P90", "P99", "mean", "slowdown", "in time", "highest load",
             "servers"]  # fmt: skip
    note = (
        f"Times to first token in ms. Slowdown: mean of TTFT over TTFT alone. Highest load: share of what the servers "
        f"can do at which {IN_TIME:.0%} of each class are in time. Servers: needed for that at the given traffic."
    )
    return Table("Side by side", heads, [_side(side) for side in a.sides], note)


def _side(side: Side) -> list[str]:
    f, reach = side.figures, side.reach
    times = [f"{1e3 * of[q]:.0f}" if of else "-" for of in (f.short, f.long) for q in ("p50", "p90", "p99")]
    load = "none" if reach.load == 0.0 else f"{'>= ' if reach.is_lower_bound else ''}{reach.load:.2f}"
    servers = "?" if side.servers is None else str(side.servers)
    return [side.setup.name, *times, f"{1e3 * f.mean_s:.0f}", f"{f.slowdown:.2f}", f"{f.in_time:.1%}", load, servers]


def against(a: Answer) -> Table:
    """Return the table of the advised LAPS setup against each other setup, on the whole traffic."""
    rows = [[side.setup.name, *_changes(side.change)] for side in a.sides if side.change is not None]
    note = f"Ratios; below 1, LAPS is faster. In brackets the 95% interval over {PARTS} parts of the traffic."
    how = "with its defaults" if a.advice.laps.name == LAPS else "with the flags that pay"
    return Table(f"LAPS {how} against", ["", *COMPARED, "in time (points)"], rows, note)


def _changes(change: Change) -> list[str]:
    ratios = [str(change.ratios[name]) if name in change.ratios else "-" for name in COMPARED]
    late = change.in_time
    points = "-" if late is None else "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in astuple(late)))
    return [*ratios, points]


def flags(a: Answer) -> Table:
    """Return the table of the effect of each flag alone."""
    rows = [[f"{t.flag} {t.value}", *_changes(t.change), t.verdict] for t in a.advice.trials]
    note = (
        f"Each alone against the defaults, as ratios, on {a.searched:,} requests in {STRETCHES} stretches of the "
        f"traffic. {PAYS}: something is {1 - GAIN:.0%} better beyond chance, nothing {HARM - 1:.0%} worse; {TRADE}: "
        f"something is worse too; {SAME}: no more than chance."
    )
    return Table("Flags of LAPS", ["", *COMPARED, "in time (points)", ""], rows, note)


def hosts(a: Answer) -> Table:
    """Return the table of LAPS against stock with other host times than the profile's."""
    rows = [[f"host x {factor:g}", *_changes(change)] for factor, change in a.hosts.items()]
    note = (
        f"{a.advice.laps.name} against {a.advice.stock.name}, where the host takes half or twice as long for "
        f"HTTP, scheduling and launches as the profile assumes; on {a.searched:,} requests in {STRETCHES} stretches of "
        "the traffic."
    )
    return Table("If the host is another", ["", *COMPARED, "in time (points)"], rows, note)


def list_limits(a: Answer) -> list[str]:
    """Return what the simulation leaves out or assumes, one sentence each."""
    return [
        "Decode servers and KV transfers are not simulated: a first token counts when its prefill ends.",
        "Memory is not: a server that runs out of KV serves fewer at a time.",
        f"Step times are those of the profile: {a.question.profile.source}.",
        "Host times beside the steps are assumptions of the profile: see the table on the host.",
        accuracy(),
    ]


def accuracy(path: Path = ACCURACY) -> str:
    """Return the accuracy of the planner against emulated servers, in a sentence."""
    if not path.exists():
        return "Not compared yet with emulated servers."
    found = json.loads(path.read_bytes())
    off = sorted(
        (abs(c["planned_ms"] / c["measured_ms"] - 1.0), f"{c['trace']}, {c['policy']}, {c['figure']}")
        for c in found["cases"]
    )
    return (
        f"Against emulated servers ({found['what']}) {len(off)} figures were off by {off[len(off) // 2][0]:.0%} in the "
        f"median, at most {off[-1][0]:.0%} ({off[-1][1]})."
    )


def text(a: Answer) -> str:
    tables = [side_by_side(a), against(a), flags(a), hosts(a)]
    blocks = ["\n".join(traffic(a)), *map(str, tables), RULE, "\n".join(list_limits(a)), "\n".join(verdict(a))]
    return "\n\n".join(blocks) + "\n"
