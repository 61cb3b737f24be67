"""Scheduler state of LAPS: requests shown to the builder, prompts in progress, results of batches. No SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cores import Request, make_batch, make_core, make_flight, make_requests
from laps_core.length import LONG, SHORT
from laps_core.policy.decode import Decode
from laps_core.policy.types import LOOKAHEAD, LongBatch, Plan
from pacers import use_up_preemptions
from sglang_laps.flights import Part, Queues, Totals

# -- decisions


@pytest.mark.parametrize(
    ("short", "long", "low_first", "first"),
    [
        ([1], [5], False, LONG),
        ([5], [1], False, SHORT),
        ([5], [1], True, LONG),
        ([3], [2, 7], False, LONG),
        ([9], [2, 7], False, SHORT),
    ],
)
def test_priority_takes_precedence_over_class(short: list[int], long: list[int], low_first: bool, first: Any) -> None:
    sign = 1 if low_first else -1
    core = make_core(priority=lambda r: sign * (r.priority or 0))
    shorts = [Request("s", 50, priority=p) for p in short]
    longs = [Request("L", 900, priority=p) for p in long]
    # A preempting batch has just ended: without priorities it is the turn of long work.
    core.pacer.gap.record_launch(0.99)
    core.pacer.gap.record_end(0.99, 1.0)
    plan = core.decide(1.0, Queues(shorts, longs, []), None, frees_memory=False)
    assert plan.order[0] is first


@pytest.mark.parametrize(("short", "goes"), [(2, False), (3, True), (4, True)])
def test_lower_priority_does_not_preempt_paused_batch(short: int, goes: bool) -> None:
    core = make_core(priority=lambda r: -(r.priority or 0))
    running = make_flight(core, layers=1)
    running.reqs[0].priority = 3
    core.under_way.append(running)
    shorts = [Request("s", 50, priority=short)]
    paused = core.paused(running, 20, 28)
    assert paused.priority == -3
    plan = core.decide(1.0, Queues(shorts, [], []), paused, frees_memory=False)
    assert plan.order == ((SHORT,) if goes else ())


@pytest.mark.parametrize("by_priority", [True, False])
def test_equal_or_disabled_priorities_keep_class_order(by_priority: bool) -> None:
    core = make_core(priority=(lambda r: 3) if by_priority else None)
    use_up_preemptions(core.pacer.gap, 0.99)
    core.pacer.gap.record_launch(0.99)
    shorts, longs = [Request("s", 50, priority=9)], [Request("L", 900, priority=1)]
    plan = core.decide(1.0, Queues(shorts, longs, []), None, frees_memory=False)
    assert plan.order[0] is LONG


@pytest.mark.parametrize(("fetched", "goes_on"), [(900, True), (50, False)])
def test_short_requests_run_while_long_prompt_is_transferred(fetched: int, goes_on: bool) -> None:
    core = make_core()
    core.lacking = True
    queues, sent = Queues([Request("s", 50)], [Request("L", 900)], []), [Request("F", fetched)]
    plan = core.decide(1.0, queues, None, frees_memory=True, sent=sent)
    assert (plan.held == "memory", bool(plan.picked)) == (not goes_on, goes_on)


def test_prompt_in_progress_is_ordered_by_remaining_tokens() -> None:
    held, parked, new = Request("P", 900, done=700), Request("Q", 5000, done=4000), Request("L", 600)
    core = make_core([parked])
    queues = core.view_queues([new], held)
    assert (queues.short, queues.long, queues.begun) == ([], [held, parked, new], [held, parked])
    plan = core.decide(1.0, queues, None, frees_memory=False)
    assert plan.long.picked[0] == 0, "200 tokens are left of it: the least work"


def test_prompt_chunked_by_paused_batch_is_not_in_progress() -> None:
    held, parked = Request("P", 900, done=100), Request("Q", 700, done=600)
    core = make_core([parked])
    assert core.view_queues([], held).begun == [held, parked]
    core.under_way.append(make_flight(core, held))
    assert core.view_queues([], held).begun == core.view_queues([], held).long == [parked]


def test_paused_depth_counts_all_batches_under_way() -> None:
    core = make_core()
    one = make_flight(core)
    core.under_way += [make_flight(core), one]
    paused = core.paused(one, 7, 28)
    assert (paused.depth, paused.left_s) == (2, float("inf")), "nothing is known of step times"
    assert not paused.rows
    core.under_way[0].shape.append((1, 50))
    assert core.paused(one, 7, 28).rows


def test_high_priority_request_is_seen_beyond_lookahead() -> None:
    core = make_core(priority=lambda r: -(r.priority or 0))
    for tokens, cls in ((50, SHORT), (900, LONG)):
        waiting = [Request(f"{i}", tokens, priority=1) for i in range(LOOKAHEAD)]
        for r in waiting:
            r.laps_tag.new_tokens = tokens
        urgent = Request("urgent", tokens, priority=9)
        queues = core.view_queues([*waiting, urgent], None)
        view = queues.short if cls == SHORT else queues.long
        assert view[:3] == [urgent, *waiting[:2]]
    running = make_flight(core, layers=1)
    core.under_way.append(running)
    shorts = [Request(f"s{i}", 50, priority=0) for i in range(LOOKAHEAD)]
    queues = core.view_queues([*shorts, Request("urgent", 50, priority=9)], None)
    plan = core.decide(1.0, queues, core.paused(running, 20, 28), frees_memory=False)
    assert queues.short[plan.picked[0]].rid == "urgent"


def test_unready_long_prompts_are_skipped_until_next_batch() -> None:
    """With HiCache storage SGLang's builder skips a request until its pages have been fetched."""
    a, b, c = Request("a", 300), Request("b", 600), Request("c", 600)
    core, queue = make_core(), [a, b, c]

    def nothing_built() -> list[str]:
        queues = core.view_queues(queue, None)
        plan = core.decide(1.0, queues, None, frees_memory=False)
        shown = [r.rid for part in core.parts(plan, queues, beside=False) for r in part.queue]
        assert core.lacking is False
        return shown

    assert nothing_built() == ["a"]
    assert core.asks_again, "the overlap loop is to ask again"
    assert nothing_built() == ["b"]
    assert nothing_built() == ["c"]
    core.asks_again = False
    assert nothing_built() == ["a"], "all were tried"
    part = Part(LONG, [b], None, 512, whole=False)
    core.record_build(part, make_batch(b), Plan((LONG,)), None, [], 1.0)
    queue = [a, c]
    assert nothing_built() == ["a"], "tried first again after each batch"
    queue = [a]
    assert nothing_built() == ["a"], "the other was aborted"


def test_long_prompt_is_not_skipped_while_no_request_may_start() -> None:
    """At ``--max-running-requests`` SGLang's builder looks at no request, so none of them is known to be unready."""
    a, b = Request("a", 300), Request("b", 600)
    core = make_core()
    core.considered = False
    for _ in range(3):
        queues = core.view_queues([a, b], None)
        plan = core.decide(1.0, queues, None, frees_memory=False)
        assert [[r.rid for r in part.queue] for part in core.parts(plan, queues, beside=False)] == [["a"]]
        assert not core.asks_again


@pytest.mark.parametrize("free", [1, 2])
def test_long_prompts_get_a_share_of_the_rows_that_become_free(free: int) -> None:
    """At ``--max-running-requests`` a row that becomes free goes to the class that is shown to the builder first."""
    core, now, got = make_core(), 0.0, {SHORT: 0, LONG: 0}
    shorts, longs = [Request(f"s{i}", 50) for i in range(40)], [Request(f"L{i}", 900) for i in range(4)]
    for n in range(1200):
        now += 0.01
        rows = free if n % 10 == 0 else 0
        queues = core.view_queues([*shorts, *longs], None)
        plan = core.decide(now, queues, None, frees_memory=True)
        for part in core.parts(plan, queues, beside=False):
            core.considered = bool(rows)
            if taken := part.queue[:rows]:
                core.record_build(part, make_batch(*taken), plan, None, [], now)
                built = core.take_next()
                assert built is not None
                built.started, built.done = now, now + 0.005
                core.record_result(built, now + 0.006)
                for r in taken:
                    got[LONG if r in longs else SHORT] += 1
                break
    rows = 120 * free
    assert got[LONG] >= rows / 5, got
    assert got[SHORT] >= rows / 4, got


def test_long_prompt_lacking_memory_is_not_skipped() -> None:
    a, b = Request("a", 300), Request("b", 600)
    core = make_core()
    queues = core.view_queues([a, b], None)
    for _ in core.parts(Plan((LONG,), long=LongBatch((0,), 300)), queues, beside=False):
        core.lacking = True
    assert (core.view_queues([a, b], None).long, core.asks_again) == ([a, b], False)


@pytest.mark.parametrize("lacking", [False, True])
def test_step_of_short_requests_does_not_tell_whether_long_prompts_lack_memory(lacking: bool) -> None:
    """Data-parallel ranks run their steps together, and a rank can have short requests alone in a step."""
    core, short = make_core(), Request("s", 50)
    core.lacking = lacking
    plan = Plan((LONG,), picked=(0,), long=LongBatch((), 512), mixed=True)
    part = next(core.parts(plan, core.view_queues([short, Request("L", 900)], None), beside=False))
    assert part.queue == [short]
    core.record_build(part, make_batch(short), plan, None, [], 1.0)
    assert core.lacking is lacking


def test_skipped_prompts_are_retried_after_memory_shortage() -> None:
    """Otherwise possibly no batch could ever run, if sessions hold the memory and the next turn was not ready."""
    a, b = Request("a", 300), Request("b", 600)
    core = make_core()

    def nothing_built(lacking: bool) -> list[str]:
        queues = core.view_queues([a, b], None)
        plan, shown = core.decide(1.0, queues, None, frees_memory=False), list[str]()
        for part in core.parts(plan, queues, beside=False):
            shown += [r.rid for r in part.queue]
            core.lacking = lacking
        return shown

    assert nothing_built(False) == ["a"]
    assert nothing_built(True) == ["b"]
    assert nothing_built(False) == ["a"]


# -- requests shown to the builder


def test_builder_sees_only_picked_requests_in_pause() -> None:
    shorts, longs, parked = make_requests("s1", "s2", "s3"), make_requests("L1", "L2"), Request("Q", 7000, done=600)
    core = make_core([parked])
    queues = Queues(shorts, [parked, *longs], [parked])

    def parts(cls: Any, beside: bool) -> Any:
        plan = Plan((cls,), picked=(2, 0), long=LongBatch((1,), 300))
        return [(p.queue, p.slot) for p in core.parts(plan, queues, beside=beside)]

    # The builder fills a whole chunk, but beside the activations of the paused batch only half a chunk fits.
    assert parts(SHORT, True) == [([shorts[2], shorts[0]], None)]
    assert parts(SHORT, False) == [([shorts[2], shorts[0], shorts[1]], None)]
    # A prompt in progress would be cut, and there is only one slot for a cut prompt.
    assert parts(LONG, True) == [([longs[0]], None)]
    assert parts(LONG, False) == [([longs[0]], None), ([], parked)]


def test_mixed_plan_adds_short_requests_to_long_batch() -> None:
    shorts, long = make_requests("s1", "s2"), Request("L", 900)
    plan = Plan((LONG,), picked=(1,), long=LongBatch((0,), 300), mixed=True)
    (part,) = make_core().parts(plan, Queues(shorts, [long], []), beside=False)
    assert (part.queue, part.tokens, part.whole) == ([shorts[1], long], 300, False)


def test_kv_tokens_of_prompts_in_progress_are_reserved() -> None:
    held, parked, slot = Request("P", 900, done=100), Request("Q", 700, done=600), Request("R", 500, done=100)
    core = make_core([parked, slot])
    assert core.reserve(Part(SHORT, []), held) == 801 + 101 + 401
    assert core.reserve(Part(LONG, [], slot, 200, whole=False), held) == 801 + 101


@pytest.mark.parametrize(
    ("tokens", "queued", "limit"), [(200, [], 200), (200, [70], 128), (200, [150], None), (0, [], None)]
)
def test_prompt_in_progress_gets_remaining_token_budget(tokens: int, queued: list[int], limit: int | None) -> None:
    slot = Request("R", 5000, done=100)
    part = Part(LONG, [Request("L", n) for n in queued], slot, tokens, whole=False)
    assert part.limit(64 if queued else 1, 1) == limit
    assert Part(LONG, [], None, tokens, whole=False).limit(1, 1) is None


def test_remove_batched_keeps_unbatched_and_added_requests() -> None:
    s1, long, s2, new = make_requests("s1", "L", "s2", "new")
    assert make_core().remove_batched(Part(SHORT, [s1, s2]), [s1, long, s2], [s2, new]) == [long, s2, new]


# -- batches


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_prompts_left_out_of_long_batch_are_parked(slot: int) -> None:
    held, parked, new = Request("P", 900, done=100), Request("Q", 700, done=600), Request("L", 5000)
    every = [held, parked, None]
    for cut in (every[slot], new, None):
        core = make_core([parked])
        part = Part(LONG, [new], every[slot], 300, whole=False)
        core.record_build(part, make_batch(new), Plan((LONG,)), cut, [held, parked], 1.0)
        assert core.chunked.parked == [r for r in (held, parked) if r is not every[slot] and r is not cut]
        assert core.chunked.unsent == (cut is not None)


def test_batch_of_whole_requests_parks_no_prompt() -> None:
    held, parked, one = Request("P", 900, done=100), Request("Q", 700, done=600), Request("s", 50)
    core = make_core([parked])
    core.record_build(Part(SHORT, [one]), make_batch(one), Plan((SHORT,)), None, [held, parked], 1.0)
    built = core.take_next()
    assert (core.chunked.parked, core.chunked.unsent) == ([parked], False)
    assert built is not None
    assert (built.layers, built.within, built.cut) == (0, False, None)
    assert core.take_next() is None


def test_long_batch_runs_in_planned_slices() -> None:
    core, new = make_core(), Request("L", 900)
    core.under_way.append(make_flight(core))
    plan = Plan((LONG,), long=LongBatch(layers=3))
    built = core.record_build(Part(LONG, [new], None, 300), make_batch(new), plan, None, [], 1.0)
    assert (built.layers, built.within) == (3, True)


def test_mixed_step_counts_both_classes_but_device_time_once() -> None:
    core = make_core()
    short, long, cut = Request("s", 50), Request("L", 400), Request("C", 900)
    short.laps_tag.slo_s = 0.5
    plan = Plan((LONG,), picked=(0,), long=LongBatch((0,)), mixed=True)
    core.record_build(
        Part(LONG, [short, long], None, 900, whole=False), make_batch(short, long, cut), plan, cut, [], 1.0
    )
    built = core.take_next()
    assert built is not None
    built.started, built.done = 1.0, 1.25
    core.record_result(built, 1.3)
    assert core.totals == {SHORT: Totals(0, 1, 50, 0.0), LONG: Totals(1, 2, 1300, 0.25)}
    assert core.pacer.slo.status(1.3)["short"]["missed"] == 1, "the one that goes on is not answered yet"


def test_carried_decode_rows_count_as_decode_step_not_prefill() -> None:
    core = make_core()
    core.decode = Decode(None)
    short, stream = Request("s", 50), Request("stream", 300)
    plan = Plan((SHORT, LONG), picked=(0,), decode="carried")
    mixed = SimpleNamespace(
        reqs=[short, stream], extend_lens=[50, 1], prefix_lens=[0, 299], decoding_reqs=[stream], forward_iter=1
    )
    parts = list(core.parts(plan, Queues([short], [], []), beside=True))
    assert [(p.cls, p.carries) for p in parts] == [(SHORT, True), (LONG, False)]
    core.record_build(parts[0], mixed, plan, None, [], 1.0)
    built = core.take_next()
    assert built is not None
    assert (built.reqs, built.rows, built.shape, list(built.short)) == ([short], 1, [(50, 0), (1, 299)], [0])
    core.record_launch(mixed, built)
    built.started, built.done = 1.0, 1.25
    core.record_result(built, 1.3)
    assert core.totals == {SHORT: Totals(1, 1, 50, 0.25), LONG: Totals()}
    assert core.decode is not None
    counted = core.decode.statistics
    assert (counted.steps, counted.carried, counted.busy_s) == (1, 1, 0.0)


def test_request_retracted_before_result_has_no_slo_record() -> None:
    """The overlap loop decodes (and can retract) a batch before it processes the batch's result."""
    core = make_core()
    one = make_flight(core, started=1.0, done=1.25)
    one.reqs[0].laps_tag.slo_s = 0.1
    one.reqs[0].laps_tag = None
    core.record_result(one, 1.3)
    assert core.totals[LONG].busy_s == 0.25
    assert LONG not in core.pacer.slo.status(1.3)
    late = make_flight(core, started=1.0, done=1.25)
    late.reqs[0].laps_tag.slo_s = 0.1
    core.record_result(late, 1.3)
    assert core.pacer.slo.status(1.3)[LONG]["missed"] == 1


def test_abandoned_batch_counts_device_time_but_no_requests() -> None:
    core = make_core()
    gone = make_flight(core, started=1.0, done=1.25, abandoned=True, stock=False)
    gone.reqs[0].laps_tag.slo_s = 0.1
    core.record_result(gone, 1.3)
    assert core.totals == {SHORT: Totals(), LONG: Totals(1, 0, 0, 0.25)}
    assert core.abandoned == 1
    assert LONG not in core.pacer.slo.status(1.3)


def test_flight_is_found_once_by_batch_number() -> None:
    """Found by the batch's number, because a pipeline creates new results and the overlap loop copies the batch."""
    core, batch, copy, other = make_core(), *(SimpleNamespace(forward_iter=n) for n in (7, 7, 8))
    one, two = make_flight(core), make_flight(core)
    core.record_launch(batch, one)
    core.record_launch(other, two)
    assert core.flight_of(copy) is one
    assert core.flight_of(batch) is None
    assert core.flight_of(other) is two


@pytest.mark.parametrize(
    ("rid", "every", "ended"),
    [("Q", False, ["Q"]), ("R", False, ["R", "RR"]), ("", True, ["Q", "R", "RR"]), ("P", False, [])],
)
def test_parked_prompts_are_aborted_by_id_prefix(rid: str, every: bool, ended: list[str]) -> None:
    core = make_core([Request(x, 900, done=9) for x in ("Q", "R", "RR")])
    core.chunked.abort(rid, every=every)
    assert [r.rid for r in core.chunked.aborted()] == ended
    assert core.chunked.aborted() == []
