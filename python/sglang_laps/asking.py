"""Questions about receipts to the schedulers, and their answers. A question travels inside SGLang's request for the
internal state, because every scheduler answers that request at once, also in the pauses of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from laps_core.receipts.recent import Query
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput

if TYPE_CHECKING:
    from sglang_laps.receipts import Receipts

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
    """Return the answer, or None if the question is not about receipts."""
    text: str = question.rid or ""
    if not text.startswith(_PREFIX):
        return None
    answer = {} if receipts is None else receipts.answer(text.removeprefix(_PREFIX))
    return GetInternalStateReqOutput(internal_state={_KEY: answer})
