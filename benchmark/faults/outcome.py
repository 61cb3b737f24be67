"""The result of a campaign: one table, figures with bars, everything raw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.faults.comparison import Compared
from benchmark.faults.oracle import ENDS, HUNG, LOST, WRONG, Oracle
from benchmark.results.piece import Figure, Piece, Table


@dataclass
class Campaign:
    """What came of it."""

    oracle: Oracle
    seed: int
    seconds: float
    """Of load."""
    inflicted: Counter[tuple[str, str]]
    rest: Sequence[str]
    """What is not at zero afterwards."""
    dead: Sequence[str]
    """Processes that nobody killed."""
    logs: Sequence[str]
    """What logs must not hold."""
    own_logs: Counter[str]
    """Tracebacks that are SGLang's own."""
    recovery: Sequence[str]
    own_errors: Sequence[str]
    """Hostile requests answered 5xx by the router itself."""
    compared: Sequence[Compared]
    sent: int
    """Hostile requests that were to be compared."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def worse(self) -> list[Compared]:
        """Hostile requests that stock takes better."""
        return [c for c in self.compared if not c.fine]

    def figures(self) -> list[Figure]:
        """Every bar is zero."""
        counts = {
            "requests hung": self.oracle.total(HUNG),
            "wrong answers": self.oracle.total(WRONG),
            "requests lost": self.oracle.total(LOST),
            "requests that ended twice": len(self.oracle.twice),
            "counters and KV pools not at zero": len(self.rest),
            "processes that ended and were not killed": len(self.dead),
            "tracebacks and alarms in logs": len(self.logs),
            "faults that were not recovered from": len(self.recovery),
            "hostile requests answered 5xx of its own making": len(self.own_errors),
            "hostile requests taken worse than by stock": len(self.worse),
            "hostile requests not compared": self.sent - len(self.compared),
        }
        bars = [Figure(name, float(n), "0", n == 0) for name, n in counts.items()]
        total = len(self.oracle.ends)
        more = {
            "requests": total,
            "requests/s": total / self.seconds if self.seconds else 0.0,
            "faults of servers and router": sum(self.inflicted.values()),
            "hostile requests at both routers": len(self.compared),
            "taken better than by stock": sum(c.better for c in self.compared),
        }
        return bars + [Figure(name, float(n)) for name, n in more.items()]

    def table(self) -> Table:
        """Ends by what the client was about."""
        rows: list[Sequence[str]] = [
            (deed, str(sum(c.values())), *(str(c[e]) for e in ENDS)) for deed, c in sorted(self.oracle.by_deed.items())
        ]
        rows.append(("all", str(len(self.oracle.ends)), *(str(self.oracle.total(e)) for e in ENDS)))
        faults = Counter[str]()
        for (_, kind), n in self.inflicted.items():
            faults[kind] += n
        note = f"{self.seconds:.0f} s of load; faults: " + (
            ", ".join(f"{n} {kind}" for kind, n in sorted(faults.items())) or "none"
        )
        return Table("How requests ended, by what their clients did", ("deed", "requests", *ENDS), rows, note)

    def piece(self) -> Piece:
        """For the report."""
        failures = self.oracle.failures
        return Piece(
            name="faults",
            title="Faults while requests run",
            text="Real prefill, decode and router processes on one machine; faults of servers and router by a seeded "
            "schedule, while clients ask, leave, abort and send rubbish. Every request must end once: answered right "
            "(the tokens of a run without faults), refused with a reason, or cut by the fault that hit it.",
            seed=self.seed,
            tables=[self.table()],
            figures=self.figures(),
            data={
                "settings": self.settings,
                "seconds": round(self.seconds, 1),
                "ends": {deed: dict(c) for deed, c in self.oracle.by_deed.items()},
                "reasons": dict(self.oracle.why.most_common()),
                "inflicted": {f"{lane} {kind}": n for (lane, kind), n in sorted(self.inflicted.items())},
                "failures": failures,
                "ended_twice": self.oracle.twice,
                "not_at_rest": list(self.rest),
                "ended_processes": list(self.dead),
                "logs": list(self.logs),
                "tracebacks_of_sglang": dict(self.own_logs),
                "not_recovered": list(self.recovery),
                "own_errors": list(self.own_errors),
                "worse_than_stock": [str(c) for c in self.worse],
                "better_than_stock": [str(c) for c in self.compared if c.better],
            },
        )

    def complaints(self, most: int = 12) -> list[str]:
        """One line each for what missed a bar."""
        lines = [f"{f['end']}: {f['deed']} {f['number']}: {f['why']}" for f in self.oracle.failures]
        for name, found in (
            ("not at rest", self.rest), ("ended", self.dead), ("log", self.logs), ("not recovered", self.recovery),
            ("own 5xx", self.own_errors), ("worse than stock", [str(c) for c in self.worse]),
        ):  # fmt: skip
            lines += [f"{name}: {x}" for x in found]
        return [*lines[:most], *([f"and {len(lines) - most} more in the result"] if len(lines) > most else [])]
