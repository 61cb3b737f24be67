"""The overlap loop of prefill servers looks for finished transfers while it waits for a result."""

from unittest.mock import MagicMock

import pytest
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin


class Stop(Exception):
    """The turn is over."""


@pytest.mark.parametrize("ready", [False, True])
def test_transfers_are_polled_on_each_turn(ready: bool) -> None:
    scheduler = MagicMock(gracefully_exit=False, _engine_paused=False, _deferred_input_requests=[], waiting_queue=[])
    scheduler.is_disagg_prefill_batch_result_ready.return_value = ready
    scheduler._is_continuous_input_polling_enabled.return_value = True
    scheduler.ingest_requests.side_effect = [[], Stop]
    scheduler.disagg_prefill_bootstrap_queue.pop_bootstrapped.return_value = []
    loop = SchedulerDisaggregationPrefillMixin.event_loop_overlap_disagg_prefill
    with pytest.raises(Stop):
        loop(scheduler)
    assert scheduler.process_batch_result.called == ready
    scheduler.process_disagg_prefill_inflight_queue.assert_called_once_with()
