"""Claims of the LAPS paper [L s4], judged on real schedulers with emulated devices. Claims about closed loops are
judged in the simulator, because such loops must be long."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import le

Runs = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]
"""Way -> "open" or "closed" -> load or clients -> figure -> value. Emulated servers have "open" only."""
HEADS = ("claim of the paper", "emulated", "simulated", "verdict", "why")
PLAIN, ROUTER = "stock", "stock, gateway"
ROUTER_LOSES = 0.047
"""Share of requests over the SLO behind the SGLang router in the paper."""
CLOSED = "a request that is put off keeps its client from asking again: TTFT and requests/s go together"


def percent(x: float) -> str:
    """Return a ratio as a change in percent."""
    return f"{100 * (x - 1):+.0f}%"


def points(x: float) -> str:
    """Return ``x`` as percentage points."""
    return f"{x:+.1f} points"


def rows(real: Runs, simulated: Runs, model: str, servers: int) -> list[Sequence[str]]:
    """Return a row for each claim about one model and number of servers."""
    found: list[Sequence[str]] = []

    def claim(
        text: str, value: Callable[[Runs], float], reached: Callable[[float], bool], to_text: Callable[[float], str],
        why: str, closed: bool = False,
    ) -> None:  # fmt: skip
        """Add the row of a claim, which is reached if its figure fulfils ``reached``. ``closed``: the claim is about
        closed loops."""
        values = [value(runs) for runs in ((simulated,) if closed else (real, simulated))]
        shown = ["-"] * closed + [to_text(value) for value in values]
        found.append((text, *shown, "reached" if reached(values[0]) else "not reached", why))

    several = servers > 1
    mine = "laps" if several else "laps servers"
    clients, loads = list(simulated[PLAIN]["closed"]), list(real[PLAIN]["open"])
    many, last = clients[-1], loads[-1]

    def over(runs: Runs, kind: str, at: str, figure: str) -> float:
        return runs[mine][kind][at][figure] / runs[PLAIN][kind][at][figure]

    def below(base: str, runs: Runs) -> float:
        """Return the share of requests over the SLO, in points below that of ``base``: mean of the open loads."""
        theirs = runs[base]["open"]
        return 100 * statistics.fmean(theirs[at]["over"] - runs[mine]["open"][at]["over"] for at in theirs)

    def p90(kind: str) -> str:
        ms = (f"{1e3 * real[name]['open'][last][f'{kind}_p90']:.0f}" for name in (PLAIN, mine))
        return f"{kind} P90 {' to '.join(ms)} ms"

    fixed = (
        f"of the time that stock is busy, {simulated[PLAIN]['closed'][many]['fixed']:.0%} is the fixed cost of steps: "
        "no more than that can be saved by fuller batches; the rest is the tokens' own"
    )
    said, least = "up to +20% requests/s", 1.2
    if several:
        said, least = "+33% requests/s with 8 instances", 1.33
    elif model == "32b":
        said, least = "+35% requests/s for 32B", 1.35
    violations = "over the SLO: " + "; ".join(
        f"{float(at):.0%}: " + ", ".join(f"{n} {of['open'][at]['over']:.1%}" for n, of in real.items()) for at in loads
    )
    bars = [("plain data parallel", PLAIN, 28), ("the SGLang router", ROUTER, 12)]
    claim(
        f"prefill latency -30% and more (mean TTFT, {many} clients)",
        lambda r: over(r, "closed", many, "mean"), lambda x: x <= 0.7, percent, CLOSED, closed=True,
    )  # fmt: skip
    claim(
        "average latency -20% at the same requests/s (mean TTFT, median of loads)",
        lambda r: statistics.median(over(r, "open", at, "mean") for at in r[PLAIN]["open"]),
        lambda x: x <= 0.8, percent, f"at {float(last):.0%}: {p90('short')}, {p90('long')}",
    )  # fmt: skip
    claim(
        f"{said} (here {servers}; best number of clients)",
        lambda r: max(over(r, "closed", n, "rate") for n in clients), partial(le, least), percent, fixed, closed=True,
    )  # fmt: skip
    for whom, base, points_below in bars if several else [("the SGLang router", PLAIN, 10)]:
        claim(
            f"violations of the SLO {points_below} points below {whom} (mean of open loads)",
            partial(below, base), partial(le, points_below), points, violations,
        )  # fmt: skip
    if not several:
        return found
    theirs = real[ROUTER]["open"]
    like = min(theirs, key=lambda at: abs(theirs[at]["over"] - ROUTER_LOSES))
    router = theirs[like]["over"]
    claim(
        f"0% of requests over the SLO against 4.7% of the SGLang router (here {router:.1%}, at {float(like):.0%})",
        lambda r: r[mine]["open"][like]["over"], lambda x: x <= 0.005 < router, lambda x: f"{x:.1%}",
        "open arrivals; the load at which the router is nearest to 4.7%",
    )  # fmt: skip
    claim(
        f"deadline-free work on 4 instances: 8% less time ({many} in flight)",
        lambda r: 1 / over(r, "closed", many, "rate"), lambda x: x <= 0.92, percent,
        "the other side of requests/s, above", closed=True,
    )  # fmt: skip
    return found
