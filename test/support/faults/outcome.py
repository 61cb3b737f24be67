"""Result of a campaign: one table, figures with bars, and the raw data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.results.piece import Figure, Piece, Table
from faults.comparison import Comparison
from faults.oracle import ENDS, HUNG, LOST, WRONG, Oracle


def make_piece(
    oracle: Oracle,
    compared: Sequence[Comparison],
    *,
    seed: int,
    seconds: float,
    inflicted: Counter[tuple[str, str]],
    wrong: Mapping[str, Sequence[str]],
    own_logs: Mapping[str, int],
    sent: int,
    settings: Mapping[str, Any],
) -> Piece:
    """Return the piece for the report. Every bar is zero.

    ``seconds``: duration of the load. ``wrong``: further failures, by the figure that counts them. ``own_logs``: number
    of tracebacks of SGLang's own bugs, by reason. ``sent``: number of hostile requests to compare.
    """
    wrong = {
        "requests that ended twice": [str(n) for n in oracle.repeated],
        **wrong,
        "hostile requests taken worse than by stock": [str(c) for c in compared if not c.acceptable],
    }
    better = [str(c) for c in compared if c.better]
    counts = {
        "requests hung": oracle.total(HUNG),
        "wrong answers": oracle.total(WRONG),
        "requests lost": oracle.total(LOST),
        **{name: len(found) for name, found in wrong.items()},
        "hostile requests not compared": sent - len(compared),
    }
    total = len(oracle.ends)
    more = {
        "requests": total,
        "requests/s": total / seconds if seconds else 0.0,
        "faults of servers and router": inflicted.total(),
        "hostile requests at both routers": len(compared),
        "taken better than by stock": len(better),
    }
    return Piece(
        name="faults",
        title="Faults while requests run",
        text="Real prefill and decode servers and two routers on one machine; faults of servers and router by a seeded "
        "schedule, while clients ask, leave, abort and send rubbish. Every request must end once: answered right "
        "(the tokens of a run without faults), refused with a reason, or cut by the fault that hit it.",
        seed=seed,
        tables=[_table(oracle, inflicted, seconds)],
        figures=[
            *(Figure(name, float(n), "0", n == 0) for name, n in counts.items()),
            *(Figure(name, float(n)) for name, n in more.items()),
        ],
        data={
            "settings": settings,
            "seconds": round(seconds, 1),
            "ends": {action: dict(c) for action, c in oracle.by_action.items()},
            "reasons": dict(oracle.why.most_common()),
            "inflicted": {f"{lane} {kind}": n for (lane, kind), n in sorted(inflicted.items())},
            "failures": oracle.failures,
            "wrong": wrong,
            "tracebacks_of_sglang": dict(own_logs),
            "better_than_stock": better,
        },
    )


def _table(oracle: Oracle, inflicted: Counter[tuple[str, str]], seconds: float) -> Table:
    """Return a table of ends, by the clients' actions."""
    rows: list[Sequence[str]] = [
        (action, str(c.total()), *(str(c[e]) for e in ENDS)) for action, c in sorted(oracle.by_action.items())
    ]
    rows.append(("all", str(len(oracle.ends)), *(str(oracle.total(e)) for e in ENDS)))
    faults = Counter[str]()
    for (_, kind), n in inflicted.items():
        faults[kind] += n
    faults_text = ", ".join(f"{n} {kind}" for kind, n in sorted(faults.items())) or "none"
    note = f"{seconds:.0f} s of load; faults: {faults_text}"
    return Table("How requests ended, by what their clients did", ("deed", "requests", *ENDS), rows, note)


def describe_failures(found: Piece, most: int = 12) -> list[str]:
    """Return one line for each cause of a missed bar."""
    lines = [f"{f['end']}: {f['deed']} {f['number']}: {f['why']}" for f in found.data["failures"]]
    lines += [f"{name}: {x}" for name, of in found.data["wrong"].items() for x in of]
    return [*lines[:most], *([f"and {len(lines) - most} more in the result"] if len(lines) > most else [])]
