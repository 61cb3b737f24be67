"""A question about receipts, on its way to the schedulers and back. It rides with SGLang's question about their
internal state: every scheduler takes that in the pauses of a batch, too, and answers at once."""

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
    """Ask the scheduler of each data-parallel rank; answers as of ``Receipts.answer``. `manager`: SGLang's tokenizer
    manager. Ranks that keep nothing are left out."""
    manager.auto_create_handle_loop()
    question = GetInternalStateReq(rid=_PREFIX + msgspec.json.encode(query).decode())
    said = await manager.get_internal_state_communicator(question)
    return [answer for one in said if (answer := one.internal_state.get(_KEY))]


def answered(question: Any, receipts: Receipts | None) -> Any:
    """Return the answer, or None where another thing is asked."""
    text: str = question.rid or ""
    if not text.startswith(_PREFIX):
        return None
    answer = {} if receipts is None else receipts.answer(text.removeprefix(_PREFIX))
    return GetInternalStateReqOutput(internal_state={_KEY: answer})
