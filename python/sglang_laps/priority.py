"""SGLang's request priorities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laps_core.length import LONG, SHORT, ClassName
from laps_core.policy.types import Paused

from sglang_laps.chunked import Req


class Priority:
    """Compares requests by priority; smaller goes first. All are equal if the server does not schedule by priority."""

    def __init__(self, of: Callable[[Req], int] | None) -> None:
        """`of`: priority of a request; None if the server does not schedule by priority."""
        self._of = of

    def of(self, req: Req) -> int:
        return 0 if self._of is None else self._of(req)

    def sort(self, view: list[Req]) -> list[Req]:
        """Return the view sorted by priority, because the plan looks only at the first requests of a view."""
        return view if self._of is None else sorted(view, key=self._of)

    def urgent(self, shorts: Sequence[Req], longs: Sequence[Req], paused: Paused | None) -> ClassName | None:
        """Return the class with the strictly higher priority, or None. Requests of paused batches are long. `shorts` is
        sorted."""
        if self._of is None or not shorts or not (longs or paused):
            return None
        long = min([*map(self._of, longs), *([] if paused is None else [paused.priority])])
        short = self._of(shorts[0])
        return None if short == long else SHORT if short < long else LONG
