"""SGLang's output streamer, extended to send receipts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from laps_core.receipts.receipt import META_KEY
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_laps.receipts import Receipts


class LapsOutputStreamer(SchedulerOutputStreamer):  # type: ignore[misc,unused-ignore]
    """Output streamer that sends the receipt of a request with the first token."""

    has_additional_customized_info: ClassVar[bool] = True
    receipts: Receipts | None = None
    """None = this rank keeps no receipts."""

    def should_build_additional_customized_info(self) -> bool:
        """Return True if this output can have a receipt."""
        return self.receipts is not None and self.receipts.due

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
        """Return the receipts of these requests; an empty dict if no request has one."""
        found = [] if self.receipts is None else self.receipts.take_receipts(reqs)
        return {META_KEY: found} if any(found) else {}
