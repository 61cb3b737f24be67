"""Closed loops that count every request: figures of whole cycles, checked by Little's law.

The answers within a span of time do not measure the load: a prompt that is parked for the whole span is in neither
their rate nor their mean. So every request *sent* within the span counts. The measurement waits for its answer while
the clients go on sending. A client's time is from its first counted request to its last counted answer. So the counted
mix is the sent mix, and rate times mean is the number of clients (Little's law), unless requests were missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from laps_plan.traffic.job import LONG, SHORT, THRESHOLD

OFF = 0.05
"""Allowed relative error of Little's law."""
STEADY = 0.1, 0.9
"""Counted part of a closed loop, as shares of all requests: at first long prompts gather, at the end work runs out."""


class Asked(NamedTuple):
    """One answered request of a client that asks again as soon as it has its answer. Times in seconds."""

    client: int
    sent_s: float
    took_s: float
    """Time until the answer was complete and the client sent again."""
    ttft_s: float
    tokens: int = 0
    """New tokens of its prompt."""

    @property
    def kind(self) -> str:
        return SHORT if self.tokens <= THRESHOLD else LONG


@dataclass(frozen=True)
class Steady:
    """Figures of a closed loop in its steady state."""

    clients: int
    requests: int
    requests_per_s: float = 0.0
    mean_ttft_s: float = 0.0
    littles_ratio: float = 0.0
    """Requests/s times the mean time of a request, over ``clients``: 1, unless requests were missed."""
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    """New tokens per second of each class."""

    @property
    def holds(self) -> bool:
        """Return True if Little's law holds, so that no request was missed."""
        return abs(self.littles_ratio - 1.0) <= OFF

    def require(self, what: str) -> Steady:
        """Return the figures. Raises ConnectionError (one line) if Little's law does not hold."""
        if not self.holds:
            raise ConnectionError(
                f"{what}: {self.requests_per_s:.3g} requests/s of {self.clients} clients do not add up "
                f"(Little's ratio {self.littles_ratio:.2f}): measure for longer"
            )
        return self


def steady(asked: Iterable[Asked], clients: int, begin_s: float, end_s: float) -> Steady:
    """Return the figures of all requests sent from `begin_s` on and before `end_s`; all must be in `asked`."""
    counted = [a for a in asked if begin_s <= a.sent_s < end_s]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for a in counted:
        first[a.client] = min(first.get(a.client, a.sent_s), a.sent_s)
        last[a.client] = max(last.get(a.client, a.sent_s), a.sent_s + a.took_s)
    # A client that sent nothing in the span waited all the time, and is not in the mean; the ratio shows that.
    spent_s = sum(last[c] - first[c] for c in first) + (clients - len(first)) * (end_s - begin_s)
    if not counted or spent_s <= 0.0:
        return Steady(clients, 0)

    def per_s(amount: float) -> float:
        return clients * amount / spent_s

    tokens = {kind: per_s(sum(a.tokens for a in counted if a.kind == kind)) for kind in (SHORT, LONG)}
    ttft_s = sum(a.ttft_s for a in counted) / len(counted)
    ratio = sum(a.took_s for a in counted) / spent_s
    return Steady(clients, len(counted), per_s(len(counted)), ttft_s, ratio, tokens)
