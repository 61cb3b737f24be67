"""The policy put together, without a server: three rules, and what they leave alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from laps_core.config import ConfigError, LapsConfig
from laps_core.latency.model import Coefficients
from laps_core.length import LONG, SHORT
from laps_core.scheduling.order import OLDEST_EVERY
from laps_core.scheduling.pacer import OVERTAKE_DEPTH, Pacer
from laps_core.scheduling.plan import Launch, Paused, Plan
from laps_core.scheduling.room import ROOM_S
from laps_core.scheduling.waiting import Waiting

from benchmark.sim.profile import Profile

F, TOKEN = 5e-3, 25e-6
GAP = F / 0.15
LAYERS, CHUNK = 28, 8192
KNOWN = Profile(name="test", source="made up", coefficients=Coefficients(0.0, TOKEN, 0.0, 0.0, F))


def pacer(
    *, known: bool = True, layers: int = LAYERS, chunk: int | None = CHUNK, unit: int = 1, **knobs: object
) -> Pacer:
    """Steps take F and TOKEN a token; `known`: it has been told."""
    config = LapsConfig(**{"wait_window_ms": 0.0, **knobs})  # type: ignore[arg-type]
    me = Pacer(config, chunk_tokens=chunk, unit=unit, layers=layers)
    if known:
        me.model = KNOWN.model()
    return me


def short(key: object, tokens: int = 50, arrival: float = 0.0, deadline: float | None = None) -> Waiting:
    """`key`: for whoever reads."""
    return Waiting(tokens, 0, arrival, deadline)


def long(tokens: int, since: float = 0.0, *, done: int = 0, deadline: float | None = None, rank: int = 0) -> Waiting:
    return Waiting(tokens - done, done, since, deadline, tokens, done > 0, rank)


def paused(left_s: float = 0.2, requests: int = 1, depth: int = 1) -> Paused:
    return Paused(left_s, requests, depth)


def launch(me: Pacer, at: float, plan: Plan, *, within: bool = False) -> Launch:
    cls = plan.order[0]
    return me.launched(at, cls, len(plan.picked if cls is SHORT else plan.longs), plan, within=within)


def run(
    me: Pacer, plan: Plan, begin: float, end: float, *shape: tuple[int, int], stock: bool = True, within: bool = False
) -> None:
    """The first batch of the plan, from its launch to its end."""
    sent = launch(me, begin, plan, within=within)
    me.finished(sent, begin, end, end, shape or ((50, 0),), end - begin, stock=stock, within=within)


def order_of(me: Pacer, now: float, longs: list[Waiting]) -> list[int]:
    """The order in which these would be served, were each a batch of its own."""
    left, found = list(range(len(longs))), []
    while left:
        first = left[me.plan(now, [], [longs[i] for i in left], waiting=1).longs[0]]
        found.append(first)
        left.remove(first)
    return found


# -- the gap


def test_short_requests_go_first_all_of_them_in_their_order() -> None:
    plan = pacer().plan(1.0, [short("a"), short("b")], [long(5000)])
    assert (plan.order, plan.picked, plan.longs) == ((SHORT, LONG), (0, 1), (0,))
    assert plan.contended


def test_nothing_waits_and_nothing_runs() -> None:
    plan = pacer().plan(1.0, [], [])
    assert plan.order == ()
    assert not plan.waiting


def test_after_a_short_batch_the_long_class_has_the_gap() -> None:
    me, shorts, longs = pacer(), [short("a")], [long(5000, 1.0)]
    sent = launch(me, 1.0, me.plan(1.0, shorts, longs))
    assert me.plan(1.3, shorts, longs).order == (LONG, SHORT), "it is still on the device"
    me.finished(sent, 1.0, 1.01, 1.01, [(50, 0)], 0.01, stock=False)
    assert me.plan(1.01 + GAP - 1e-6, shorts, longs).order == (LONG, SHORT)
    assert me.plan(1.01 + GAP + 1e-6, shorts, longs).order == (SHORT, LONG)


def test_a_short_batch_preempts_what_is_paused_once_the_gap_is_over() -> None:
    me, shorts = pacer(), [short("a")]
    plan = me.plan(1.0, shorts, [], paused=paused())
    assert (plan.order, plan.picked) == ((SHORT,), (0,))
    run(me, plan, 1.0, 1.01, stock=False, within=True)
    assert me.status(2.0)["preemption"]["by_short_batches"] == 1
    assert me.plan(1.01 + GAP - 1e-6, shorts, [], paused=paused()).order == (), "what is paused goes on"
    assert me.plan(1.01 + GAP + 1e-6, shorts, [], paused=paused()).order == (SHORT,)


def test_a_smaller_overhead_is_a_wider_gap() -> None:
    for overhead in (0.05, 0.5):
        me = pacer(preempt_overhead=overhead)
        run(me, me.plan(0.0, [short("a")], [long(5000)]), 0.0, 0.01, stock=False)
        opens = 0.01 + F / overhead
        assert me.plan(opens - 1e-6, [short("b")], [long(5000)]).order[0] is LONG
        assert me.plan(opens + 1e-6, [short("b")], [long(5000)]).order[0] is SHORT


def test_a_long_prompt_that_is_far_behind_widens_it() -> None:
    me, lone_s = pacer(), F + 1000 * TOKEN
    run(me, me.plan(0.0, [short("a")], [long(1000, 9.0)]), 9.0, 9.0, stock=False)
    behind = [long(1000, 9.0 + 1.5 * GAP - 12.0 * lone_s)]  # three times its aim, half of a gap later
    assert me.plan(9.0 + 1.5 * GAP, [short("b")], [long(1000, 9.0)]).order[0] is SHORT
    assert me.plan(9.0 + 1.5 * GAP, [short("b")], behind).order[0] is LONG
    assert me.plan(9.0 + 8.1 * GAP, [short("b")], [long(1000, -1e6)]).order[0] is SHORT, "to eight times itself at most"


def test_a_short_batch_alone_leaves_the_gap_alone() -> None:
    me = pacer()
    run(me, me.plan(0.0, [short("a")], []), 0.0, 0.01, stock=False)
    assert me.plan(0.011, [short("b")], [long(5000)]).order == (SHORT, LONG)


# -- what a batch holds


def test_a_batch_stays_within_the_chunk_and_what_preempts_within_half() -> None:
    many = [short(i, 200) for i in range(50)]
    me = pacer(chunk=1024)
    assert me.plan(1.0, many, []).picked == (0, 1, 2, 3, 4)
    assert me.plan(1.0, many, [long(5000)]).picked == (0, 1, 2, 3, 4)
    assert me.plan(1.0, many, [], paused=paused()).picked == (0, 1), "beside the activations of what is paused"
    assert me.plan(1.0, [short("a", 256)], [], paused=paused()).picked == (0,)
    assert len(pacer(chunk=None).plan(1.0, many, [], paused=paused()).picked) == 50
    small = pacer(chunk=300).plan(1.0, [short("a", 256), short("b", 256)], [], paused=paused())
    assert small.picked == (0,), "a short request fits, whatever the half"


def test_a_long_batch_is_whole_units() -> None:
    me = pacer(chunk=1000, unit=64)
    assert me.plan(0.0, [], [long(5000)]).tokens == 960
    assert me.plan(0.0, [], [long(300)]).tokens == 320
    assert pacer(chunk=None).plan(0.0, [], [long(5000)]).tokens == 0
    assert pacer(chunk=1024).plan(0.0, [], [long(1 << 20)]).tokens == 1024


def test_a_chunk_that_holds_no_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 is less than 64 tokens"):
        pacer(chunk=32, unit=64)
    assert pacer(chunk=64, unit=64).plan(0.0, [], [long(5000)]).tokens == 64


def test_a_lone_long_prompt_goes_chunk_after_chunk() -> None:
    me, done = pacer(chunk=1024, layers=0), 0
    while done < 5000:
        plan = me.plan(float(done), [], [long(5000, done=done)])
        assert (plan.order, plan.longs) == ((LONG,), (0,))
        done += plan.tokens
    assert done == 5000


def test_a_batch_that_the_host_could_not_keep_up_with_runs_whole() -> None:
    me = pacer()
    tokens = 2000
    took = F + tokens * TOKEN
    assert me.plan(0.0, [], [long(tokens)]).layers > 0
    me.sizes.launch_s = 0.51 * took
    assert me.plan(0.0, [], [long(tokens)]).layers == 0
    assert me.plan(0.0, [], [long(2 * tokens)]).layers > 0


def test_slices_take_their_time_from_the_model() -> None:
    me = pacer()
    took = F + CHUNK * TOKEN
    plan = me.plan(0.0, [], [long(20_000)])
    assert plan.layers == max(1, int(4e-3 / (took / LAYERS)))
    assert pacer(slice_ms=50.0).plan(0.0, [], [long(20_000)]).layers == int(50e-3 / (took / LAYERS))
    assert pacer(slice_ms=1000.0).plan(0.0, [], [long(20_000)]).layers == 0, "two slices are not worth a pause"
    assert me.plan(0.0, [], [long(100)]).layers == 0
    assert pacer(known=False).plan(0.0, [], [long(20_000)]).layers == 1, "nothing is known: as often as it can be"
    assert pacer(layers=0).plan(0.0, [], [long(20_000)]).layers == 0
    whole = pacer(slice_ms=6.0)
    assert whole.plan(0.0, [], [long(280)]).layers == 0
    assert whole.plan(0.0, [], [long(281)]).layers > 0


# -- least work first, and the guard


def test_the_least_work_goes_first() -> None:
    me = pacer()
    assert order_of(me, 1.0, [long(3000), long(900), long(20_000, done=19_500), long(900, -1.0)]) == [2, 3, 1, 0]
    cached = Waiting(300, 100_000, 0.0, None, 300)
    assert order_of(pacer(), 1.0, [long(400), cached]) == [1, 0]


def test_an_idle_server_runs_the_small_one_alone_and_a_loaded_one_fills_the_batch() -> None:
    longs = [long(2000 + i) for i in range(3)]
    assert pacer().plan(0.0, [], longs).longs == (0,)
    assert pacer().plan(0.0, [], longs, waiting=100).longs == (0, 1, 2)


def test_what_others_have_earned_puts_the_oldest_first() -> None:
    me = pacer()
    longs = [long(20_000, 0.0), long(600, 1.0), long(500, 2.0)]
    plan = me.plan(3.0, [], longs)
    assert plan.longs[0] == 2
    assert not plan.oldest
    run(me, plan, 3.0, 3.02, (500, 0), stock=False)
    assert me.guard.due()
    plan = me.plan(3.1, [], longs[:2])
    assert plan.longs[0] == 0
    assert plan.oldest
    run(me, plan, 3.1, 3.3, (CHUNK, 0), stock=False)
    assert not me.guard.due()
    assert me.plan(3.4, [], [long(20_000, 0.0, done=CHUNK), longs[1]]).longs[0] == 1


def test_nobody_is_cut_into_the_batch_of_another() -> None:
    alone = pacer(chunk=4096).plan(1.0, [], [long(6000, 0.0), long(4000, 1.0)], waiting=100)
    assert (alone.longs, alone.tokens, alone.oldest) == ((1,), 4000, False)
    whole = pacer().plan(1.0, [], [long(4100, 0.0), long(4000, 1.0)], waiting=100)
    assert (whole.longs, whole.oldest) == ((1, 0), True)
    first = pacer(chunk=4096).plan(1.0, [], [long(6000, 0.0), long(7000, 1.0)])
    assert (first.longs, first.oldest) == ((0,), True)


def test_without_a_guard_the_least_work_is_always_first() -> None:
    me = pacer(guard=0.0)
    for i in range(50):
        plan = me.plan(float(i), [], [long(20_000, 0.0), long(500, float(i))])
        assert plan.longs[0] == 1
        run(me, plan, float(i), i + 0.1, (500, 0), stock=False)


def test_the_guard_forgets_what_was_earned_when_no_long_work_is_left() -> None:
    for forget in (lambda me: me.nothing_waits(), lambda me: me.plan(2.0, [short("a")], [])):
        me = pacer()
        run(me, me.plan(0.0, [], [long(20_000, 0.0), long(500, 1.0)]), 1.0, 1.1, (500, 0), stock=False)
        assert me.guard.due()
        forget(me)
        assert not me.guard.due()


def test_the_guard_stands_back_for_what_found_no_memory() -> None:
    me = pacer()
    longs = [long(20_000, 0.0), long(500, 1.0)]
    run(me, me.plan(1.0, [], longs), 1.0, 1.1, (500, 0), stock=False)
    assert me.plan(1.1, [], longs, lacking=True).longs[0] == 0
    later = me.plan(1.2 + ROOM_S, [], longs, lacking=True)
    assert not later.keeps_room
    assert later.longs[0] == 1, "room was kept for it in vain"
    assert me.plan(1.3 + ROOM_S, [], longs).longs[0] == 0


@pytest.mark.parametrize("order", ["fcfs", "edf", "lars", "s-edf"])
def test_the_other_orders_are_what_they_say(order: str) -> None:
    longs = [
        long(900, 0.3, deadline=50.0),
        long(20_000, 0.2, deadline=40.0),
        long(900, 0.1),
        long(900, 0.0, deadline=0.5),
    ]
    expected = {"fcfs": [3, 2, 1, 0], "edf": [1, 0, 2, 3], "lars": [3, 1, 0, 2], "s-edf": [1, 0, 2, 3]}
    assert order_of(pacer(order=order), 1.0, longs) == expected[order]


def test_deadlines_order_short_requests_too_when_asked() -> None:
    shorts = [
        short("late", deadline=0.5),
        short("none"),
        short("second", deadline=9.0),
        short("first", deadline=5.0),
    ]
    assert pacer(order="edf").plan(1.0, shorts, [long(5000)]).picked == (3, 2, 1, 0)
    # In order of arrival; only what is too late goes last.
    assert pacer().plan(1.0, shorts, [long(5000)]).picked == (1, 2, 3, 0)


def test_patience_bounds_how_often_the_other_orders_pass_a_long_prompt_over() -> None:
    me, turns = pacer(order="edf"), 0
    for turns in range(1, 20):
        now = float(turns)
        plan = me.plan(now, [], [long(9000, 0.0), long(9000, now, deadline=now + 60.0)], waiting=1)
        run(me, plan, now, now + 0.2, (CHUNK, 0), stock=False)
        if plan.longs[0] == 0:
            break
    assert turns == OLDEST_EVERY


# -- priorities


@pytest.mark.parametrize("paused", [None, paused()])
def test_a_higher_priority_comes_before_the_gap(paused: Paused | None) -> None:
    me, shorts, longs = pacer(), [short("a")], [long(5000)]
    before = me.plan(1.0, shorts, longs, urgent=LONG, paused=paused)
    assert SHORT not in before.order[:1]
    run(me, me.plan(1.0, shorts, longs), 1.0, 1.01, stock=False)
    assert me.plan(1.011, shorts, longs, urgent=SHORT, paused=paused).order[0] is SHORT


def test_a_higher_priority_comes_before_work_and_guard() -> None:
    me = pacer()
    longs = [long(500, 0.0), long(20_000, 1.0, rank=-1), long(30_000, 2.0, rank=-1)]
    for i in range(3):
        plan = me.plan(3.0 + i, [], longs)
        assert plan.longs[0] == 1
        run(me, plan, 3.0 + i, 3.2 + i, (CHUNK, 0), stock=False)


def test_for_a_short_request_of_higher_priority_nothing_long_overtakes() -> None:
    longs = [long(400, 0.9)]
    assert pacer().plan(1.0, [], longs, paused=paused(1.0)).order == (LONG,)
    assert pacer().plan(1.0, [], longs, paused=paused(1.0), urgent=SHORT).order == ()


def test_nothing_of_lower_priority_overtakes_what_is_paused() -> None:
    plan = pacer().plan(1.0, [], [long(400, rank=1), long(500, rank=0)], paused=paused(1.0))
    assert plan.longs == (1,)
    assert pacer().plan(1.0, [], [long(400, rank=1)], paused=paused(1.0)).order == ()


# -- overtaking


def test_what_is_much_smaller_overtakes_what_is_paused() -> None:
    me = pacer()
    longs = [long(9000), long(400), long(300), long(50_000, done=49_900)]
    plan = me.plan(1.0, [], longs, paused=paused(0.5))
    assert (plan.order, plan.longs) == ((LONG,), (2, 1))
    assert plan.tokens == 700
    assert me.plan(1.0, [], longs, paused=paused(0.01)).order == (), "what is paused is nearly done"
    assert me.plan(1.0, [], longs, paused=paused(0.5, depth=OVERTAKE_DEPTH)).order == ()
    assert me.plan(1.0, [], longs, paused=paused(0.5), waiting=400).order == (), "all of them would pay for it"


def test_a_short_batch_goes_before_one_that_overtakes() -> None:
    assert pacer().plan(1.0, [short("a")], [long(400)], paused=paused(0.5)).order == (SHORT,)


def test_two_that_overtake_are_a_gap_apart() -> None:
    me = pacer(guard=0.0)
    plan = me.plan(1.0, [], [long(400, 1.0)], paused=paused(0.5))
    run(me, plan, 1.0, 1.02, (400, 0), stock=False, within=True)
    assert me.status(2.0)["preemption"]["by_smaller_prompts"] == 1
    assert me.plan(1.02 + GAP - 1e-6, [], [long(400, 1.0)], paused=paused(0.5)).order == ()
    assert me.plan(1.02 + GAP + 1e-6, [], [long(400, 1.0)], paused=paused(0.5)).order == (LONG,)


@pytest.mark.parametrize("knobs", [{"known": False}, {"order": "fcfs"}, {"order": "lars"}])
def test_nothing_overtakes_by_guesswork_or_against_the_order(knobs: dict[str, object]) -> None:
    assert pacer(**knobs).plan(1.0, [], [long(300)], paused=paused(9.0)).order == ()  # type: ignore[arg-type]


def test_nothing_overtakes_while_the_oldest_is_due() -> None:
    me = pacer()
    plan = me.plan(1.0, [], [long(400, 0.9)], paused=paused(0.5))
    run(me, plan, 1.0, 1.02, (400, 0), stock=False, within=True)
    assert me.guard.due(), "what has overtaken has earned it"
    assert me.plan(2.0, [], [long(400, 1.9)], paused=paused(0.5)).order == ()


# -- where a batch cannot pause


def test_without_slices_a_chunk_takes_no_longer_than_the_gap() -> None:
    me = pacer(layers=0)
    tokens = me.plan(0.0, [], [long(20_000)]).tokens
    assert tokens == int(GAP / TOKEN)
    assert pacer(layers=0, unit=64).plan(0.0, [], [long(20_000)]).tokens == tokens // 64 * 64
    assert pacer(layers=0, unit=4096).plan(0.0, [], [long(20_000)]).tokens == 4096, "one unit at least"
    assert pacer(layers=0, known=False).plan(0.0, [], [long(20_000)]).tokens == CHUNK
    assert pacer(layers=0, preempt_overhead=0.01).plan(0.0, [], [long(20_000)]).tokens == CHUNK
    slow = pacer(layers=0)
    slow.model.predict = lambda requests: F + sum(TOKEN * n + 1e-9 * n * (n + 2 * h) for n, h in requests)  # type: ignore[method-assign]
    tokens = slow.plan(0.0, [], [long(200_000, done=100_000)]).tokens
    assert slow.model.predict([(tokens, 100_000)]) - F <= GAP < slow.model.predict([(tokens + 1, 100_000)]) - F  # type: ignore[operator]


def test_a_long_history_does_not_make_for_tiny_chunks() -> None:
    """Read once more it takes longer than the gap: then a chunk is as long as that, not one token."""
    me, history = pacer(layers=0), 100_000
    me.model = replace(KNOWN, coefficients=Coefficients(0.0, TOKEN, 1e-6, 0.0, F)).model()
    least_s = F + 1e-6 * history
    assert least_s > GAP
    assert me.plan(0.0, [], [long(200_000, done=history)]).tokens == pytest.approx(least_s / TOKEN, abs=1)


def test_without_slices_short_requests_share_the_step() -> None:
    me = pacer(layers=0)
    plan = me.plan(1.0, [short("a"), short("b", 100)], [long(20_000)])
    assert plan.mixed
    assert (plan.order[0], plan.picked, plan.longs) == (LONG, (0, 1), (0,))
    assert plan.tokens == int(GAP / TOKEN) + 150
    paged = pacer(layers=0, unit=64, preempt_overhead=1.0).plan(1.0, [short("a", 1), short("b", 65)], [long(20_000)])
    assert paged.tokens == int(F / TOKEN) // 64 * 64 + 64 + 128, "each begins a page of its own"
    assert not me.plan(1.0, [], [long(20_000)]).mixed
    assert not pacer().plan(1.0, [short("a")], [long(20_000)]).mixed
    assert pacer(layers=0, chunk=1024).plan(1.0, [short("a", 200)], [long(20_000)]).tokens == 1024


def test_a_shared_step_counts_for_both() -> None:
    me = pacer(layers=0)
    plan = me.plan(1.0, [short("a"), short("b")], [long(20_000)])
    sent = me.launched(1.0, LONG, 3, plan, shorts=2)
    assert (sent.cls, sent.preempts, sent.shorts) == (LONG, False, 2)
    me.finished(sent, 1.0, 1.1, 1.1, [(50, 0), (50, 0), (1000, 0)], 0.1, stock=False)
    assert sum(me.status(2.0)["window"]["dispatched"].values()) == 1


# -- memory


def test_room_is_kept_for_a_prompt_that_is_owed_only() -> None:
    me = pacer()
    shorts, longs = [short("a")], [long(20_000, 0.0), long(500, 1.0)]
    assert not me.plan(1.0, shorts, longs, lacking=True).keeps_room, "it is owed nothing yet"
    run(me, me.plan(1.0, [], longs), 1.0, 1.1, (500, 0), stock=False)
    plan = me.plan(1.1, shorts, longs, lacking=True)
    assert plan.keeps_room
    assert (plan.order, plan.picked, plan.longs[0]) == ((LONG,), (), 0)
    assert Plan.of(plan.numbers()).keeps_room
    for at, kept in ((1.2, True), (1.1 + ROOM_S, False), (1.1 + 2 * ROOM_S, True)):
        plan = me.plan(at, shorts, longs, lacking=True)
        assert (plan.keeps_room, bool(plan.picked)) == (kept, not kept)
    assert not me.plan(20.0, shorts, longs).keeps_room, "it has found room"
    assert not me.plan(21.0, shorts, [], lacking=True).keeps_room


def test_room_is_kept_for_what_is_far_behind_or_urgent_too() -> None:
    late, shorts = [long(500, -60.0)], [short("a")]
    assert pacer().plan(1.0, shorts, late, lacking=True).keeps_room
    assert pacer().plan(1.0, shorts, [long(5000, 1.0)], lacking=True, urgent=LONG).keeps_room
    beside = pacer().plan(1.0, shorts, late, lacking=True, paused=paused())
    assert beside.keeps_room
    assert (beside.order, beside.picked) == ((), ()), "what is paused goes on and gives its memory back"


# -- no long work


def test_without_long_work_the_window_decides_as_if_alone() -> None:
    """The same arrivals through the pacer and through a window of its own, to the last number."""
    from laps_core.scheduling.decision import Dispatch
    from laps_core.scheduling.window import Window

    config = LapsConfig()
    me = Pacer(config, chunk_tokens=CHUNK, layers=LAYERS)
    me.model = KNOWN.model()
    window, now, held = Window(config), 0.0, 0
    came, waiting = [1.0 + 4e-4 * i for i in range(6)], []
    for _ in range(200):
        now = now if waiting else max(now, came[0])
        arrived = [at for at in came if at <= now]
        came = came[len(arrived) :]
        waiting += [short(at, 50, now) for at in arrived]
        if arrived:
            window.arrived(now, len(arrived), me._seen_s if me._blind else None)
        me.arrived(now, len(arrived))
        said = window.decide(now, waiting, token_budget=CHUNK, predict=me.model.predict)
        plan = me.plan(now, waiting, [])
        if not isinstance(said, Dispatch):
            assert (plan.order, plan.waiting, plan.until_s) == ((), True, said.until_s)
            now = min([said.until_s, *came[:1]])
            held += 1
            continue
        assert (plan.order, plan.picked, plan.reason) == ((SHORT,), said.picked, said.reason)
        assert not plan.contended
        window.dispatched(now, len(said.picked), said.waited_s, said.reason)
        sent, begin = launch(me, now, plan), now
        now += F + 50 * TOKEN * len(said.picked)
        window.completed(now, len(said.picked))
        me.finished(sent, begin, now, now, [], now - begin, stock=False)
        waiting = [w for i, w in enumerate(waiting) if i not in said.picked]
        came += [now + 4e-4 * (i + 1) for i in range(len(said.picked))]  # clients send again when they are answered
        came.sort()
    assert me.window.status() == window.status()
    assert held


def test_while_long_work_waits_nothing_is_held() -> None:
    me = pacer(window="fixed", wait_window_ms=50.0)
    assert me.plan(1.0, [short("a", arrival=1.0)], []).waiting
    plan = me.plan(1.001, [short("a", arrival=1.0)], [long(5000)])
    assert (plan.order[0], plan.reason, plan.waiting) == (SHORT, "preempt", False)
    assert plan.waited_s == pytest.approx(0.001)


# -- the latency model, the status


def fitted(me: Pacer, at: float = 0.0) -> Pacer:
    """Measured steps of 1 ms and 0.1 ms a token."""
    for i in range(40):
        tokens = 20 + 40 * (i % 12)
        run(me, me.plan(at, [short("a", tokens)], []), at, at + 1e-3 + 1e-4 * tokens, (tokens, 0))
        at += 0.1
    assert me.model.fitted
    return me


def test_a_paused_batch_teaches_its_own_time() -> None:
    one, two = pacer(known=False), pacer(known=False)
    for i in range(40):
        tokens, at = 300 + 40 * (i % 12), float(i)
        took = 1e-3 + 1e-4 * tokens
        for me, paused_s in ((one, 0.0), (two, 0.125)):
            sent = launch(me, at, me.plan(at, [], [long(tokens)]))
            end = at + took + paused_s
            me.finished(sent, at, end, end, [(tokens, 0)], end - at - paused_s, stock=True)
    for tokens in (100, 500, 2000):
        assert one.model.predict([(tokens, 0)]) == pytest.approx(two.model.predict([(tokens, 0)]), rel=1e-6)


def contended(me: Pacer) -> None:
    plan = me.plan(4.0, [short("b")], [long(20_000, 3.0), long(400, 3.5)])
    launch(me, 4.0, plan)
    run(me, me.plan(4.1, [], [long(400, 3.5)], paused=paused(0.5)), 4.1, 4.2, (400, 0), within=True)


@pytest.mark.parametrize("work", [lambda me: None, contended])
def test_asking_for_the_status_changes_nothing(work: Callable[[Pacer], None]) -> None:
    me = pacer(known=False, length_threshold="auto", wait_window_ms=5.0, ttft_slo_ms=400.0)
    fitted(me)
    work(me)
    me.slo.record(4.0, "short", 0.7, 0.4)
    before = pickle.dumps(me)
    first = me.status(5.0)
    me.status(500.0)
    assert pickle.dumps(me) == before
    assert me.status(5.0) == first
    assert set(first["preemption"]) == {"gap_ms", "by_short_batches", "by_smaller_prompts"}
    assert set(first["fairness"]) == {"guard", "credit_s"}


def test_without_slices_short_requests_leave_the_chunk_half_of_the_step() -> None:
    crowd = [short(i, 256) for i in range(64)]
    plan = pacer(layers=0).plan(1.0, crowd, [long(9000)])
    assert plan.mixed
    joining = sum(256 for _ in plan.picked)
    assert 0 < joining <= CHUNK // 2
    assert plan.tokens > joining
