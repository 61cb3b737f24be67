"""The answer as one self-contained HTML page with plots, and as JSON."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO

import msgspec
import numpy as np

from laps_plan.pictures import COLOURS, axes, distributions
from laps_plan.plan import words
from laps_plan.plan.advice import RULE
from laps_plan.plan.answer import Answer
from laps_plan.plan.setup import IN_TIME
from laps_plan.table import Table
from laps_plan.traffic.job import THRESHOLD

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { border-left: 4px solid #0b6e4f; background: #f2f7f5; padding: .6rem 1rem; }
.verdict.stock { border-color: #c1440e; background: #faf4f1; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { font-weight: 600; } code { background: #eee; padding: .1rem .3rem; }
svg { max-width: 100%; height: auto; } .note { color: #666; font-size: .9rem; }
"""


def page(a: Answer) -> str:
    verdict = "verdict" if a.advice.recommended else "verdict stock"
    curves = {kind: {s.setup.name: s.curves[kind] for s in a.sides} for kind in a.sides[0].curves}
    parts = [
        "<h1>What LAPS would bring</h1>",
        f'<div class="{verdict}">{_paragraphs(words.verdict(a))}</div>',
        _paragraphs(words.traffic(a)),
        *map(_table, (words.side_by_side(a), words.against(a))),
        "<h2>Times to first token</h2>",
        _svg(lambda f: distributions(curves, "", f)),
        "<h2>Load and share in time</h2>",
        _svg(lambda f: _loads(a, f)),
        f'<p class="note">Of the class that fares worse. Dotted: {IN_TIME:.0%}, and the load of this traffic.</p>',
        *map(_table, (words.flags(a), words.hosts(a))),
        f'<p class="note">{html.escape(RULE)}</p>',
        "<h2>The lengths</h2>",
        _svg(lambda f: _lengths(a, f)),
        "<h2>What this does not know</h2>",
        f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in words.list_limits(a))}</ul>",
        f'<p class="note">laps-plan, {a.seconds:.0f} s.</p>',
    ]
    head = f'<meta charset="utf-8"><title>laps-plan</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def as_json(a: Answer) -> str:
    """Return the answer as JSON. Times in seconds; null for numbers that are not finite."""
    data = {
        "recommended": {"laps": a.advice.recommended, "flags": a.advice.setup.flags(), "pools": a.advice.setup.pools},
        "best_stock": {"policy": a.advice.stock.name, "flags": a.advice.stock.flags()},
        "laps": {"flags": a.advice.laps.flags(), "against": {k: c.as_dict() for k, c in a.advice.against.items()}},
        "traffic": {
            "what": a.traffic.what,
            "notes": a.traffic.notes,
            "requests": len(a.traffic.jobs),
            "rate_per_s": a.traffic.rate,
            "load": a.load,
            "hopeless": a.hopeless,
        },
        "question": {
            "profile": a.question.profile.name,
            "source": a.question.profile.source,
            "servers": a.question.servers,
            "ttft_s": [a.question.short_s, a.question.long_s],
            "chunk": a.question.chunk,
            "capacity_per_s": a.capacity,
        },
        "side_by_side": [
            {
                "policy": s.setup.name,
                "flags": s.setup.flags(),
                **asdict(s.figures),
                "laps_against": None if s.change is None else s.change.as_dict(),
                "highest_load": s.reach.load,
                "loads": s.reach.curve,
                "servers_needed": s.servers,
            }
            for s in a.sides
        ],
        "flags": [
            {"flag": t.flag, "value": t.value, "against_defaults": t.change.as_dict(), "verdict": t.verdict}
            for t in a.advice.trials
        ],
        "host_times": [{"factor": k, "laps_against_stock": c.as_dict()} for k, c in a.hosts.items()],
        "rule": RULE,
        "limits": words.list_limits(a),
        "seconds": a.seconds,
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"


def _paragraphs(lines: Sequence[str]) -> str:
    said = []
    for line in lines:
        before, flags, after = line.partition(": --")
        text = html.escape(before)
        said.append(f"<p>{text}: <code>--{html.escape(after)}</code></p>" if flags else f"<p>{text}</p>")
    return "".join(said)


def _table(table: Table) -> str:
    # tabulate escapes the text of the cells.
    note = f'<p class="note">{html.escape(table.note)}</p>'
    return f"<h2>{html.escape(table.title)}</h2>{table.grid('html')}{note}"


def _svg(draw: Callable[[IO[str]], None]) -> str:
    drawn = io.StringIO()
    draw(drawn)
    whole = drawn.getvalue()
    return whole[whole.index("<svg") :]


def _loads(a: Answer, to: IO[str]) -> None:
    with axes(1, to, width=8.0) as (axis,):
        for side in a.sides:
            name = side.setup.name
            load, share = zip(*side.reach.curve, strict=True)
            axis.plot(load, share, marker="o", markersize=3, label=name, color=COLOURS.get(name))
        axis.axhline(IN_TIME, color="#888888", linewidth=0.8, linestyle=":")
        if a.load <= 1.0:
            axis.axvline(a.load, color="#888888", linewidth=0.8, linestyle=":")
        axis.set(xlabel="load (share of what the servers can do)", ylabel="share in time", ylim=(0.0, 1.02))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)


def _lengths(a: Answer, to: IO[str]) -> None:
    new = np.array([job.new for job in a.traffic.jobs], dtype=float)
    edges = np.geomspace(1.0, max(2.0, new.max()), 60)
    with axes(2, to) as each:
        for axis, weights, what in zip(each, (None, new), ("requests", "new tokens"), strict=True):
            share = (np.ones(len(new)) if weights is None else weights) / (len(new) if weights is None else new.sum())
            axis.hist(new, bins=edges, weights=share, color=COLOURS["laps"])
            axis.axvline(THRESHOLD, color="#888888", linewidth=0.8, linestyle=":")
            axis.set(xscale="log", xlabel="new tokens of a request", ylabel=f"share of {what}")
