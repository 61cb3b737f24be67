"""Beam searches that lose their memory while they run: the server pauses and retracts all requests, or a request of
higher priority takes a row. SGLang cannot start them again, and would keep the rows of their beams for ever."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.beam_search.fork import free_member_rows
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_laps import compat

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

SEND = "managers.scheduler.Scheduler.send_abort_output"
RELEASE = "managers.schedule_batch.release_req"
"""Function that frees the memory of a request that is retracted."""
MESSAGE = "The beam search was retracted, and cannot be continued. Retry later."


def free_rows(*, req: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any, **_: Any) -> None:
    """Free the rows and the KV memory of all beams but the first, before ``release_req`` frees those of the first."""
    group = req.beam_group
    if group is not None and group.member_rows is not None:
        free_member_rows(group, req_to_token_pool, token_to_kv_pool_allocator)
        req.laps_lost_beams = True


def end_if_lost(scheduler: Scheduler, req: Any) -> bool:
    """Return True for a beam search that has lost its beams, after telling its client; False for other requests."""
    if not getattr(req, "laps_lost_beams", False):
        return False
    scheduler.beam_coordinator.retire_group(req)
    reason = FINISH_ABORT(MESSAGE, status_code=HTTPStatus.SERVICE_UNAVAILABLE).to_json()
    told = AbortReq(rid=req.rid, finished_reason=reason)
    if SEND in compat.release().missing:
        scheduler.ipc_channels.send_to_tokenizer.send_output(told, req)
    else:
        scheduler.send_abort_output(told, req)
    return True
