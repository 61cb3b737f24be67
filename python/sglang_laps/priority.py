"""SGLang's request priorities, and the plan's view of paused batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laps_core.length import LONG, SHORT, ClassName
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import Paused

from sglang_laps.chunked import Req
from sglang_laps.flights import Flight, as_waiting


class Priority:
    """Compares requests by priority; smaller goes first. All are equal if the server does not schedule by priority."""

    def __init__(self, of: Callable[[Req], int] | None) -> None:
        """`of`: priority of a request; None if the server does not schedule by priority."""
        self._of = of

    def of(self, req: Req) -> int:
        """Return the priority of a request."""
        return 0 if self._of is None else self._of(req)

    def sort(self, view: list[Req]) -> list[Req]:
        """Return the view sorted by priority, because the plan looks only at the first requests of a view."""
        return view if self._of is None else sorted(view, key=self._of)

    def urgent(self, shorts: Sequence[Req], longs: Sequence[Req], paused: Paused | None) -> ClassName | None:
        """Return the class with the strictly higher priority, or None. Requests of paused batches are long."""
        if self._of is None or not shorts or not (longs or paused):
            return None
        long = min([*map(self._of, longs), *([] if paused is None else [paused.priority])])
        short = min(map(self._of, shorts))
        return None if short == long else SHORT if short < long else LONG


def as_paused(
    flight: Flight, under_way: Sequence[Flight], pacer: Pacer, priority: Priority, layers_left: float, layers: int
) -> Paused:
    """Return the plan's view of the batches `under_way` in a pause of `flight`, the last of these batches.
    `layers_left` of all `layers` of `flight` are still to run."""
    whole_s = pacer.model.predict(flight.shape)
    reqs = [r for f in under_way for r in f.reqs]
    first = min(map(priority.of, reqs), default=0)
    seen = [as_waiting(r) for r in reqs]
    weight, due_s = pacer.sizes.weight(seen), [w.deadline_s for w in seen if w.deadline_s is not None]
    due = min(due_s, default=None)
    if whole_s is None:
        return Paused(float("inf"), len(under_way), first, weight, due)
    left_s, slice_s = whole_s * layers_left / layers, whole_s * flight.layers / (layers * flight.parts)
    return Paused(left_s, len(under_way), first, weight, due, slice_s)
