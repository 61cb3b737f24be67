"""Questions about receipts to the schedulers, and their answers. A question travels inside SGLang's request for the
internal state, because every scheduler answers that request at once, also in the pauses of a batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from laps_core.receipts.recent import Query
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput

if TYPE_CHECKING:
    from sglang_laps.receipts import Receipts

logger = logging.getLogger(__name__)

_PREFIX = "laps-receipts:"
_KEY = "laps_receipts"


async def ask(manager: Any, query: Query) -> list[Mapping[str, Any]]:
    """Ask the scheduler of each data-parallel rank; return the answers of ``Receipts.answer``, without ranks that keep
    no receipts. `manager`: SGLang's tokenizer manager."""
    manager.auto_create_handle_loop()
    question = GetInternalStateReq(rid=_PREFIX + msgspec.json.encode(query).decode())
    said = await manager.get_internal_state_communicator(question)
    return [answer for one in said if (answer := one.internal_state.get(_KEY))]


def answer_query(question: Any, receipts: Receipts | None) -> Any:
    """Return the answer, empty if it fails, or None if the question is not about receipts."""
    text: str = question.rid or ""
    if not text.startswith(_PREFIX):
        return None
    answer: dict[str, Any] = {}
    try:
        if receipts is not None:
            answer = receipts.answer(text.removeprefix(_PREFIX))
    except Exception:
        # An exception here would end the scheduler, and with it all requests.
        logger.exception("LAPS: a question about receipts failed")
    return GetInternalStateReqOutput(internal_state={_KEY: answer})
