"""The pipeline-parallel prefill loop ends an aborted chunked prefill before it plans the next chunk."""

import inspect
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin


class Stop(Exception):
    """The loop has come to its next chunk."""


def test_abort_comes_before_the_next_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = MagicMock(pp_loop_size=1, running_mbs=[None], last_mbs=[None])
    scheduler.process_prefill_chunk.side_effect = Stop
    loop = inspect.unwrap(SchedulerPPMixin.event_loop_pp_disagg_prefill)
    monkeypatch.setitem(loop.__globals__, "get_parallel", lambda: MagicMock(pp_size=1))
    with pytest.raises(Stop):
        loop(scheduler)
    scheduler.process_pending_chunked_abort.assert_called_once_with()
