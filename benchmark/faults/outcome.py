"""The result of a campaign: one table, figures with bars, everything raw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    wrong: Mapping[str, Sequence[str]]
    """By the figure that counts them: what must not be, beside how requests ended."""
    own_logs: Counter[str]
    """Tracebacks that are SGLang's own."""
    compared: Sequence[Compared]
    sent: int
    """Hostile requests that were to be compared."""
    settings: Mapping[str, Any]

    @property
    def all_wrong(self) -> dict[str, Sequence[str]]:
        """What must be empty, by the figure that counts it."""
        worse = [str(c) for c in self.compared if not c.fine]
        return {
            "requests that ended twice": [str(n) for n in self.oracle.twice],
            **self.wrong,
            "hostile requests taken worse than by stock": worse,
        }

    def figures(self) -> list[Figure]:
        """Every bar is zero."""
        counts = {
            "requests hung": self.oracle.total(HUNG),
            "wrong answers": self.oracle.total(WRONG),
            "requests lost": self.oracle.total(LOST),
            **{name: len(found) for name, found in self.all_wrong.items()},
            "hostile requests not compared": self.sent - len(self.compared),
        }
        bars = [Figure(name, float(n), "0", n == 0) for name, n in counts.items()]
        total = len(self.oracle.ends)
        more = {
            "requests": total,
            "requests/s": total / self.seconds if self.seconds else 0.0,
            "faults of servers and router": self.inflicted.total(),
            "hostile requests at both routers": len(self.compared),
            "taken better than by stock": sum(c.better for c in self.compared),
        }
        return bars + [Figure(name, float(n)) for name, n in more.items()]

    def table(self) -> Table:
        """Ends by what the client was about."""
        rows: list[Sequence[str]] = [
            (deed, str(c.total()), *(str(c[e]) for e in ENDS)) for deed, c in sorted(self.oracle.by_deed.items())
        ]
        rows.append(("all", str(len(self.oracle.ends)), *(str(self.oracle.total(e)) for e in ENDS)))
        faults = Counter[str]()
        for (_, kind), n in self.inflicted.items():
            faults[kind] += n
        told = ", ".join(f"{n} {kind}" for kind, n in sorted(faults.items())) or "none"
        note = f"{self.seconds:.0f} s of load; faults: {told}"
        return Table("How requests ended, by what their clients did", ("deed", "requests", *ENDS), rows, note)

    def piece(self) -> Piece:
        """For the report."""
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
                "failures": self.oracle.failures,
                "wrong": self.all_wrong,
                "tracebacks_of_sglang": dict(self.own_logs),
                "better_than_stock": [str(c) for c in self.compared if c.better],
            },
        )

    def complaints(self, most: int = 12) -> list[str]:
        """One line each for what missed a bar."""
        lines = [f"{f['end']}: {f['deed']} {f['number']}: {f['why']}" for f in self.oracle.failures]
        lines += [f"{name}: {x}" for name, found in self.all_wrong.items() for x in found]
        return [*lines[:most], *([f"and {len(lines) - most} more in the result"] if len(lines) > most else [])]
