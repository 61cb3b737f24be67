"""Scheduler state of LAPS: requests shown to the builder, prompts in progress, results of batches. No SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cores import Request, batch, core, flight, requests
from laps_core.length import LONG, SHORT
from laps_core.policy.decode import Decode
from laps_core.policy.types import LOOKAHEAD, LongBatch, Plan
from pacers import spend
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
def test_priorities_come_before_classes(short: list[int], long: list[int], low_first: bool, first: Any) -> None:
    sign = 1 if low_first else -1
    me = core(priority=lambda r: sign * (r.priority or 0))
    shorts = [Request("s", 50, priority=p) for p in short]
    longs = [Request("L", 900, priority=p) for p in long]
    # A preempting batch has just ended: without priorities it is the turn of long work.
    me.pacer.gap.record_launch(0.99)
    me.pacer.gap.record_end(0.99, 1.0)
    plan = me.decide(1.0, Queues(shorts, longs, []), None, frees_memory=False)
    assert plan.order[0] is first


@pytest.mark.parametrize(("short", "goes"), [(2, False), (3, True), (4, True)])
def test_what_is_paused_counts_with_its_priority(short: int, goes: bool) -> None:
    me = core(priority=lambda r: -(r.priority or 0))
    running = flight(me, layers=1)
    running.reqs[0].priority = 3
    me.under_way.append(running)
    shorts = [Request("s", 50, priority=short)]
    paused = me.paused(running, 20, 28)
    assert paused.priority == -3
    plan = me.decide(1.0, Queues(shorts, [], []), paused, frees_memory=False)
    assert plan.order == ((SHORT,) if goes else ())


@pytest.mark.parametrize("by_priority", [True, False])
def test_equal_priorities_or_none_change_nothing(by_priority: bool) -> None:
    me = core(priority=(lambda r: 3) if by_priority else None)
    spend(me.pacer.gap, 0.99)
    me.pacer.gap.record_launch(0.99)
    shorts, longs = [Request("s", 50, priority=9)], [Request("L", 900, priority=1)]
    plan = me.decide(1.0, Queues(shorts, longs, []), None, frees_memory=False)
    assert plan.order[0] is LONG


@pytest.mark.parametrize(("fetched", "goes_on"), [(900, True), (50, False)])
def test_short_requests_go_on_while_a_long_prompt_is_fetched(fetched: int, goes_on: bool) -> None:
    me = core()
    me.lacking = True
    queues, sent = Queues([Request("s", 50)], [Request("L", 900)], []), [Request("F", fetched)]
    plan = me.decide(1.0, queues, None, frees_memory=True, sent=sent)
    assert (plan.held == "memory", bool(plan.picked)) == (not goes_on, goes_on)


def test_a_prompt_in_progress_goes_on_from_where_it_is() -> None:
    held, parked, new = Request("P", 900, done=700), Request("Q", 5000, done=4000), Request("L", 600)
    me = core([parked])
    queues = me.view_queues([new], held)
    assert (queues.short, queues.long, queues.begun) == ([], [held, parked, new], [held, parked])
    plan = me.decide(1.0, queues, None, frees_memory=False)
    assert plan.long.picked[0] == 0, "200 tokens are left of it: the least work"


def test_a_prompt_that_a_paused_batch_has_cut_is_not_in_progress() -> None:
    held, parked = Request("P", 900, done=100), Request("Q", 700, done=600)
    me = core([parked])
    assert me.view_queues([], held).begun == [held, parked]
    me.under_way.append(flight(me, held))
    assert me.view_queues([], held).begun == me.view_queues([], held).long == [parked]


def test_what_is_paused_counts_every_batch_under_way() -> None:
    me = core()
    one = flight(me)
    me.under_way += [flight(me), one]
    paused = me.paused(one, 7, 28)
    assert (paused.depth, paused.left_s) == (2, float("inf")), "nothing is known of step times"


def test_behind_more_requests_than_are_looked_at_a_high_priority_is_seen() -> None:
    me = core(priority=lambda r: -(r.priority or 0))
    for tokens, cls in ((50, SHORT), (900, LONG)):
        waiting = [Request(f"{i}", tokens, priority=1) for i in range(LOOKAHEAD)]
        for r in waiting:
            r.laps_tag.new_tokens = tokens
        urgent = Request("urgent", tokens, priority=9)
        queues = me.view_queues([*waiting, urgent], None)
        view = queues.short if cls == SHORT else queues.long
        assert view[:3] == [urgent, *waiting[:2]]
    running = flight(me, layers=1)
    me.under_way.append(running)
    shorts = [Request(f"s{i}", 50, priority=0) for i in range(LOOKAHEAD)]
    queues = me.view_queues([*shorts, Request("urgent", 50, priority=9)], None)
    plan = me.decide(1.0, queues, me.paused(running, 20, 28), frees_memory=False)
    assert queues.short[plan.picked[0]].rid == "urgent"


def test_long_prompts_that_are_not_ready_make_way_for_those_that_are() -> None:
    """With HiCache storage SGLang's builder skips a request until its pages have been fetched."""
    a, b, c = Request("a", 300), Request("b", 600), Request("c", 600)
    me, queue = core(), [a, b, c]

    def nothing_built() -> list[str]:
        queues = me.view_queues(queue, None)
        plan = me.decide(1.0, queues, None, frees_memory=False)
        shown = [r.rid for part in me.parts(plan, queues, beside=False) for r in part.queue]
        assert me.lacking is False
        return shown

    assert nothing_built() == ["a"]
    assert me.asks_again, "the overlap loop is to ask again"
    assert nothing_built() == ["b"]
    assert nothing_built() == ["c"]
    me.asks_again = False
    assert nothing_built() == ["a"], "all were tried"
    part = Part(LONG, [b], None, 512, whole=False)
    me.record_build(part, batch(b), Plan((LONG,)), None, [], 1.0, sliced=False)
    queue = [a, c]
    assert nothing_built() == ["a"], "tried first again after each batch"
    queue = [a]
    assert nothing_built() == ["a"], "the other was aborted"


def test_a_long_prompt_that_lacks_memory_does_not_make_way() -> None:
    a, b = Request("a", 300), Request("b", 600)
    me = core()
    queues = me.view_queues([a, b], None)
    for _ in me.parts(Plan((LONG,), long=LongBatch((0,), 300)), queues, beside=False):
        me.lacking = True
    assert (me.view_queues([a, b], None).long, me.asks_again) == ([a, b], False)


def test_prompts_that_were_not_ready_are_tried_again_after_one_that_lacks_memory() -> None:
    """Otherwise possibly no batch could ever run, if sessions hold the memory and the next turn was not ready."""
    a, b = Request("a", 300), Request("b", 600)
    me = core()

    def nothing_built(lacking: bool) -> list[str]:
        queues = me.view_queues([a, b], None)
        plan, shown = me.decide(1.0, queues, None, frees_memory=False), list[str]()
        for part in me.parts(plan, queues, beside=False):
            shown += [r.rid for r in part.queue]
            me.note_lack(lacking)
        return shown

    assert nothing_built(False) == ["a"]
    assert nothing_built(True) == ["b"]
    assert nothing_built(False) == ["a"]


# -- requests shown to the builder


def test_beside_a_paused_batch_it_is_shown_what_was_picked_and_nothing_else() -> None:
    shorts, longs, parked = requests("s1", "s2", "s3"), requests("L1", "L2"), Request("Q", 7000, done=600)
    me = core([parked])
    queues = Queues(shorts, [parked, *longs], [parked])

    def parts(cls: Any, beside: bool) -> Any:
        plan = Plan((cls,), picked=(2, 0), long=LongBatch((1,), 300))
        return [(p.queue, p.slot) for p in me.parts(plan, queues, beside=beside)]

    # The builder fills a whole chunk, but beside the activations of the paused batch only half a chunk fits.
    assert parts(SHORT, True) == [([shorts[2], shorts[0]], None)]
    assert parts(SHORT, False) == [([shorts[2], shorts[0], shorts[1]], None)]
    # A prompt in progress would be cut, and there is only one slot for a cut prompt.
    assert parts(LONG, True) == [([longs[0]], None)]
    assert parts(LONG, False) == [([longs[0]], None), ([], parked)]


def test_short_requests_join_a_long_batch_where_the_plan_says_so() -> None:
    shorts, long = requests("s1", "s2"), Request("L", 900)
    plan = Plan((LONG,), picked=(1,), long=LongBatch((0,), 300), mixed=True)
    (part,) = core().parts(plan, Queues(shorts, [long], []), beside=False)
    assert (part.queue, part.tokens, part.whole) == ([shorts[1], long], 300, False)


def test_the_memory_of_those_in_progress_is_kept() -> None:
    held, parked, slot = Request("P", 900, done=100), Request("Q", 700, done=600), Request("R", 500, done=100)
    me = core([parked, slot])
    assert me.reserve(Part(SHORT, []), held) == 801 + 101 + 401
    assert me.reserve(Part(LONG, [], slot, 200, whole=False), held) == 801 + 101


@pytest.mark.parametrize(
    ("tokens", "queued", "limit"), [(200, [], 200), (200, [70], 128), (200, [150], None), (0, [], None)]
)
def test_the_prompt_in_progress_gets_what_those_before_it_leave(
    tokens: int, queued: list[int], limit: int | None
) -> None:
    slot = Request("R", 5000, done=100)
    part = Part(LONG, [Request("L", n) for n in queued], slot, tokens, whole=False)
    assert part.limit(64 if queued else 1, 1) == limit
    assert Part(LONG, [], None, tokens, whole=False).limit(1, 1) is None


def test_what_the_builder_took_and_added_is_kept() -> None:
    s1, long, s2, new = requests("s1", "L", "s2", "new")
    assert core().remove_batched(Part(SHORT, [s1, s2]), [s1, long, s2], [s2, new]) == [long, s2, new]


# -- batches


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_those_that_had_no_part_in_a_long_batch_are_parked(slot: int) -> None:
    held, parked, new = Request("P", 900, done=100), Request("Q", 700, done=600), Request("L", 5000)
    every = [held, parked, None]
    for cut in (every[slot], new, None):
        me = core([parked])
        part = Part(LONG, [new], every[slot], 300, whole=False)
        me.record_build(part, batch(new), Plan((LONG,)), cut, [held, parked], 1.0, sliced=False)
        assert me.chunked.parked == [r for r in (held, parked) if r is not every[slot] and r is not cut]
        assert me.chunked.unsent == (cut is not None)


def test_a_batch_of_whole_requests_parks_nobody() -> None:
    held, parked, one = Request("P", 900, done=100), Request("Q", 700, done=600), Request("s", 50)
    me = core([parked])
    me.record_build(Part(SHORT, [one]), batch(one), Plan((SHORT,)), None, [held, parked], 1.0, sliced=True)
    built = me.take_next()
    assert (me.chunked.parked, me.chunked.unsent) == ([parked], False)
    assert built is not None
    assert (built.layers, built.within, built.cut) == (0, False, None)
    assert me.take_next() is None


@pytest.mark.parametrize("sliced", [True, False])
def test_a_long_batch_is_run_in_slices_where_it_can_be(sliced: bool) -> None:
    me, new = core(), Request("L", 900)
    me.under_way.append(flight(me))
    me.record_build(
        Part(LONG, [new], None, 300), batch(new), Plan((LONG,), long=LongBatch(layers=3)), None, [], 1.0, sliced=sliced
    )
    built = me.take_next()
    assert built is not None
    assert (built.layers, built.within) == (3 if sliced else 0, True)


def test_both_classes_of_a_shared_step_are_counted_and_the_device_once() -> None:
    me = core()
    short, long, cut = Request("s", 50), Request("L", 400), Request("C", 900)
    short.laps_tag.slo_s = 0.5
    plan = Plan((LONG,), picked=(0,), long=LongBatch((0,)), mixed=True)
    me.record_build(
        Part(LONG, [short, long], None, 900, whole=False), batch(short, long, cut), plan, cut, [], 1.0, sliced=False
    )
    built = me.take_next()
    assert built is not None
    built.started, built.done = 1.0, 1.25
    done = me.record_result(built, 1.3)
    assert (done[SHORT].batches, done[SHORT].requests, done[SHORT].tokens, done[SHORT].busy_s) == (0, 1, 50, 0.0)
    assert (done[LONG].batches, done[LONG].requests, done[LONG].tokens, done[LONG].busy_s) == (1, 2, 1300, 0.25)
    assert me.totals[LONG].requests == 2
    assert me.pacer.slo.status(1.3)["short"]["missed"] == 1, "the one that goes on is not answered yet"


def test_rows_of_streams_are_a_decode_step_and_no_prefill() -> None:
    me = core()
    me.decode = Decode(None)
    short, stream = Request("s", 50), Request("stream", 300)
    plan = Plan((SHORT, LONG), picked=(0,), decode="carried")
    mixed = SimpleNamespace(
        reqs=[short, stream], extend_lens=[50, 1], prefix_lens=[0, 299], decoding_reqs=[stream], forward_iter=1
    )
    parts = list(me.parts(plan, Queues([short], [], []), beside=True))
    assert [(p.cls, p.carries) for p in parts] == [(SHORT, True), (LONG, False)]
    me.record_build(parts[0], mixed, plan, None, [], 1.0, sliced=True)
    built = me.take_next()
    assert built is not None
    assert (built.reqs, built.rows, built.shape, list(built.short)) == ([short], 1, [(50, 0), (1, 299)], [0])
    me.record_launch(mixed, built)
    built.started, built.done = 1.0, 1.25
    assert me.record_result(built, 1.3)[SHORT] == Totals(1, 1, 50, 0.25)
    assert me.decode is not None
    counted = me.decode.statistics
    assert (counted.steps, counted.carried, counted.busy_s) == (1, 1, 0.0)


def test_a_request_that_was_retracted_before_its_result_came_is_not_answered() -> None:
    """The overlap loop decodes (and can retract) a batch before it processes the batch's result."""
    me = core()
    one = flight(me, started=1.0, done=1.25)
    one.reqs[0].laps_tag = None
    assert me.record_result(one, 1.3)[LONG].busy_s == 0.25
    assert LONG not in me.pacer.slo.status(1.3)


def test_a_batch_that_nobody_waited_for_counts_its_time_and_no_requests() -> None:
    me = core()
    gone = flight(me, started=1.0, done=1.25, abandoned=True, stock=False)
    gone.reqs[0].laps_tag.slo_s = 0.1
    done = me.record_result(gone, 1.3)
    assert (done[LONG].batches, done[LONG].requests, done[LONG].tokens, done[LONG].busy_s) == (1, 0, 0, 0.25)
    assert me.abandoned == 1
    assert LONG not in me.pacer.slo.status(1.3)


def test_a_result_finds_its_batch_once() -> None:
    """Found by the batch's number, because a pipeline creates new results and the overlap loop copies the batch."""
    me, batch, copy, other = core(), *(SimpleNamespace(forward_iter=n) for n in (7, 7, 8))
    one, two = flight(me), flight(me)
    me.record_launch(batch, one)
    me.record_launch(other, two)
    assert me.flight_of(copy) is one
    assert me.flight_of(batch) is None
    assert me.flight_of(other) is two


@pytest.mark.parametrize(
    ("rid", "every", "ended"),
    [("Q", False, ["Q"]), ("R", False, ["R", "RR"]), ("", True, ["Q", "R", "RR"]), ("P", False, [])],
)
def test_parked_prompts_are_aborted_by_the_begin_of_their_id(rid: str, every: bool, ended: list[str]) -> None:
    me = core([Request(x, 900, done=9) for x in ("Q", "R", "RR")])
    me.chunked.abort(rid, every=every)
    assert [r.rid for r in me.chunked.aborted()] == ended
    assert me.chunked.aborted() == []
