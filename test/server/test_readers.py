"""Every function of SGLang that uses the scheduler's queue or batches, with what LAPS shows it there: none is new.

LAPS shows SGLang's batch builder a part of the queue and a slot of the part's own, and in a pause the scheduler is
inside a pass. A new function fails this test; whoever has read it adds it to its line in ``REVIEWED``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sglang_laps import compat

STATE = {"waiting_queue", "running_batch", "last_batch", "chunked_req", "result_queue", "grammar_queue"}
STATE |= {f"get_{name}" for name in STATE}
"""Attributes of the scheduler whose values LAPS changes, and functions that return them."""
OFF = ("disaggregation/decode", "dllm/", "hardware_backend/", "multiplex/")
"""Modules for which LAPS is off, or with which it refuses to start."""
REVIEWED = """
start: the values are made, or handed on as functions (count_parked, Builder and whole_view replace three of these)
Scheduler init_running_status init_chunked_prefill init_overlap init_request_receiver init_invariant_checker
Scheduler init_load_inquirer
GrammarManager __init__

build: the part that is shown, its slot; parts that need all requests get them (whole_view, count_rows, load_inquirer)
Scheduler _get_new_batch_prefill_raw get_num_allocatable_reqs
PrefillAdder __init__ add_chunked_req add_one_req add_one_req_ignore_eos preempt_to_schedule
PrefillAdder _defer_staged_for_capacity_if_idle
SchedulePolicy calc_priority _compute_prefix_matches _determine_active_policy shortest_prefill_chunk_limit
SchedulePolicy _sort_by_dfs_weight _sort_by_hrrn _sort_by_longest_output _sort_by_longest_prefix
SchedulePolicy _sort_by_priority_and_fcfs _sort_by_routing_key _sort_by_shortest_prefill _sort_randomly
SchedulePolicy _touch_waiting_prefixes
LoRADrainer update_draining_state _update_adapter_stats
SchedulerLoadInquirer _get_num_pending_tokens

build-joined: requests that SGLang queues during a build are kept apart; grammars are hidden, LAPS takes them in before
Scheduler _add_request_to_queue _abort_on_queued_limit
GrammarManager has_waiting_grammars get_ready_grammar_requests

loop: everything, between two batches; slots of parked prompts are changed around the call (LapsPrefillMixin)
Scheduler event_loop_normal event_loop_overlap event_loop_overlap.pop_and_process is_disable_overlap_for_batch
Scheduler get_next_batch_to_run _process_storage_prefetch_retries process_pending_chunked_abort pause_generation
StoragePrefetchRetries pop_ready
SchedulePolicy waiting_queue_prefix_matched
SchedulerDisaggregationPrefillMixin event_loop_normal_disagg_prefill event_loop_overlap_disagg_prefill
SchedulerDisaggregationPrefillMixin get_next_disagg_prefill_batch_to_run process_prefill_chunk
SchedulerDisaggregationPrefillMixin has_bootstrapped_waiting_req
SchedulerPPMixin event_loop_pp_disagg_prefill process_bootstrapped_queue
SchedulerInvariantChecker _requests_owning_rows self_check_during_busy

launch: in a pause the slot of the paused batch, which is in no other batch, and no queued results (they are processed)
Scheduler run_batch _relay_forward_payload _reqs_finishing_inflight _advance_pending_grammar
ScheduleBatch convert_decode_to_extend
eagle_utils _eagle_prefill_tail_tokens

result: in the loop or in a pause, everything; the slot holds the cut prompt of the batch (process_batch_result)
SchedulerDisaggregationPrefillMixin process_batch_result_disagg_prefill optimistic_release_and_requeue
SchedulerMetricsReporter report_prefill_stats report_decode_stats _update_lora_metrics _build_queued_request_metrics
SchedulerLoadInquirer get_loads get_num_waiting_uncached_tokens
SchedulerStatusLogger maybe_dump
GrammarManager __len__

message: in the loop or in a pause, everything; paused batches and parked prompts are added (is_fully_idle,
message: _collect_inflight_batches, chunked.abort), or the message waits for the end of the pass (messages)
Scheduler abort_request is_fully_idle flush_cache attach_hicache_storage_wrapped detach_hicache_storage_wrapped
Scheduler record_weight_version_change _collect_inflight_batches
GrammarManager abort_requests process_req_with_grammar

message: no parked prompts and no paused batch: asked only with DFLASH, which has no pauses; a prompt accepts no drafts
SchedulerInternalStateController _has_active_sampling_mask_request

poll: in the loop or in a pause, everything
Scheduler _poll_timeout_aborts
SchedulerDisaggregationPrefillMixin resolve_waiting_queue_bootstrap process_disagg_prefill_inflight_queue
SchedulerRequestReceiver recv_requests

idle: everything, nothing runs and no prompt is parked
SchedulerMetricsReporter _maybe_log_idle_metrics

off: pipelines of servers that decode
SchedulerPPMixin event_loop_pp event_loop_pp_disagg_decode process_retract_queue process_decode_transfer_queue
"""
"""Functions by class or module, below a line that says when they run, and what LAPS shows them then."""


def uses(tree: ast.AST, within: tuple[str, ...]) -> Iterator[str]:
    """Yield the functions that use ``STATE``, or take a queue as argument, each with its class or module."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from uses(node, (*within, node.name) if named else within)  # type: ignore[attr-defined]
        if (isinstance(node, ast.Attribute) and node.attr in STATE) or (
            isinstance(node, ast.arg) and node.arg == "waiting_queue"
        ):
            # A function outside of a class stands for its module.
            yield " ".join((within[-2 if len(within) < 3 else 1], ".".join(within[2:]) or within[-1]))


def readers(root: Path) -> set[str]:
    """Return all such functions of the release whose modules are below `root`."""
    found = set[str]()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(errors="replace")
        if not path.relative_to(root).as_posix().startswith(OFF) and any(name in text for name in STATE):
            found.update(uses(ast.parse(text), (path.stem,)))
    return found


def test_each_reader_of_queue_and_batches_is_reviewed() -> None:
    lines = [line.split() for line in REVIEWED.splitlines() if line and ":" not in line]
    reviewed = [f"{owner} {name}" for owner, *names in lines for name in names]
    assert len(reviewed) == len(set(reviewed))
    spec = find_spec("sglang.srt")
    assert spec is not None
    found = readers(Path(next(iter(spec.submodule_search_locations or ()))))
    assert found - set(reviewed) == set(), "new in this release: what does LAPS show these functions?"
    if compat.installed() == list(compat.RELEASES)[-1]:
        assert set(reviewed) - found == set(), "no longer in this release"
