"""Closed loops that count everybody: figures of whole cycles, and Little's law as the check of them.

Answers that land in a stretch of time are not a measure of it: a prompt that is parked the whole time is in neither
their rate nor their mean. Counted here is every request that was *sent* in the stretch, all of them waited for, while
the clients go on asking; the time of a client is from its first of these to its last answer. So the mix that is counted
is the mix that was asked, and rate times mean is the number of clients (Little's law), unless somebody was missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from laps_plan.traffic.job import LONG, SHORT, THRESHOLD

OFF = 0.05
"""By which rate times mean may miss the number of clients."""
STEADY = 0.1, 0.9
"""Requests of a closed loop between which those lie that are counted, as shares of all: at first long ones gather, at
last there is no more work."""


class Asked(NamedTuple):
    """One answered request of a client that asks again as soon as it has its answer. Times in seconds."""

    client: int
    sent_s: float
    took_s: float
    """Until the answer was whole, and the client asked again."""
    ttft_s: float
    tokens: int = 0
    """New tokens of its prompt."""

    @property
    def kind(self) -> str:
        """Return the class of the request."""
        return SHORT if self.tokens <= THRESHOLD else LONG


@dataclass(frozen=True)
class Steady:
    """A closed loop in its steady state."""

    clients: int
    requests: int
    requests_per_s: float = 0.0
    mean_ttft_s: float = 0.0
    littles_ratio: float = 0.0
    """Requests/s times the mean time of a request, over ``clients``: 1, unless requests were missed."""
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    """New tokens of each class."""

    @property
    def holds(self) -> bool:
        """Return True if these figures are of everybody."""
        return abs(self.littles_ratio - 1.0) <= OFF

    def as_dict(self) -> dict[str, Any]:
        """For a piece (JSON-ready)."""
        return asdict(self)

    def require(self, what: str) -> Steady:
        """Itself. Raises ConnectionError (one line) where Little's law does not hold."""
        if not self.holds:
            raise ConnectionError(
                f"{what}: {self.requests_per_s:.3g} requests/s of {self.clients} clients do not add up "
                f"(Little's ratio {self.littles_ratio:.2f}): measure for longer"
            )
        return self


def steady(asked: Iterable[Asked], clients: int, begin_s: float, end_s: float) -> Steady:
    """The figures of all requests that were sent from `begin_s` until `end_s`, each of which is in `asked`."""
    counted = [a for a in asked if begin_s <= a.sent_s < end_s]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for a in counted:
        first[a.client] = min(first.get(a.client, a.sent_s), a.sent_s)
        last[a.client] = max(last.get(a.client, a.sent_s), a.sent_s + a.took_s)
    # One that asked nothing meanwhile waited all the time, and has no part in the mean: then the ratio says so.
    spent_s = sum(last[c] - first[c] for c in first) + (clients - len(first)) * (end_s - begin_s)
    if not counted or spent_s <= 0.0:
        return Steady(clients, 0)

    def per_s(amount: float) -> float:
        return clients * amount / spent_s

    tokens = {kind: per_s(sum(a.tokens for a in counted if a.kind == kind)) for kind in (SHORT, LONG)}
    ttft_s = sum(a.ttft_s for a in counted) / len(counted)
    ratio = sum(a.took_s for a in counted) / spent_s
    return Steady(clients, len(counted), per_s(len(counted)), ttft_s, ratio, tokens)
