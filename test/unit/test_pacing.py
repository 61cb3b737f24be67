"""The whole policy without a server: order of batches, pauses, and memory kept for prompts."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from laps_core.busy import BusyMeter
from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.policy.memory import HOLD_S
from laps_core.policy.pacer import SOONER, Pacer
from laps_core.policy.predict import LAUNCHES
from laps_core.policy.types import Paused, Plan, Running, Waiting
from pacers import CHUNK, GAP, KNOWN, LAYERS, TOKEN, F, ended, launch, long, pacer, paused, run, short, spend

# -- the gap


def test_a_deadline_comes_before_the_gap_where_it_would_be_missed_and_can_be_met() -> None:
    me, work = pacer(), [long(50_000, since=1.0)]
    plan = me.plan(0.99, [short("a")], work)
    spend(me.gap, 0.99)
    run(me, plan, 0.99, 1.0)
    done_s, opens_at = F + 50 * TOKEN, 1.0 + GAP

    def first(now: float, *deadlines: float | None) -> object:
        return me.plan(now, [short(n, arrival=now, deadline=d) for n, d in enumerate(deadlines)], work).order[0]

    assert first(me.gap.opens_at(), None) is SHORT, "the gap is over"
    now = 1.01
    assert first(now, now + done_s + 1e-4) is SHORT
    assert first(now, now + done_s - 1e-4) is LONG, "too late for that one, whatever is done"
    assert first(now, opens_at + done_s - 1e-4) is SHORT
    assert first(now, opens_at + done_s + 1e-4) is LONG, "it can wait for the gap"
    assert first(now, None, opens_at + done_s - 1e-4) is SHORT
    assert first(now, None) is LONG
    assert first(1.0 + F - 1e-4, 1.02) is LONG, "a step's fixed time is left between two even then"
    assert first(1.0 + F + 1e-4, 1.02) is SHORT


def test_no_deadline_comes_before_the_end_of_what_preempts() -> None:
    me, shorts, longs = pacer(), [short("a", deadline=2.0)], [long(5000, 1.0)]
    plan = me.plan(1.0, shorts, longs)
    spend(me.gap, 1.0)
    launch(me, 1.0, plan)
    assert me.plan(1.1, shorts, longs).order == (LONG, SHORT)


def test_a_decision_is_put_off_until_there_is_just_time_to_launch() -> None:
    me, running = pacer(), Running(cls=LONG, shape=[(1000, 0)], started=5.0)
    took_s = me.model.predict(running.shape)
    assert took_s is not None
    assert me.decision_time_s(5.0, [running]) == 5.0, "no launch was timed"
    for seconds in (2e-3, 5e-3, 3e-3):
        me.sizes.record_launch_time(seconds)
    assert me.decision_time_s(5.0, [running]) == pytest.approx(5.0 + (1.0 - SOONER) * took_s - 5e-3)
    assert me.decision_time_s(5.0 + took_s, [running]) == 5.0 + took_s
    assert me.decision_time_s(5.0, []) == 5.0
    unknown = pacer(known=False)
    unknown.sizes.record_launch_time(1e-3)
    assert unknown.decision_time_s(5.0, [running]) == 5.0
    for _ in range(LAUNCHES):
        me.sizes.record_launch_time(1e-3)
    assert me.sizes.lead_s == 1e-3, "what was slow once is forgotten"


def test_what_is_found_after_a_batch_has_run_may_have_come_since_it_was_last_looked() -> None:
    found: list[float | None] = []
    me = pacer()

    def arrived(now: float, n: int = 1, since: float | None = None) -> None:
        found.append(since)

    me.window.record_arrivals = arrived  # type: ignore[assignment, method-assign]
    me.record_arrivals(1.0, 1)
    me.record_arrivals(2.0, 1, busy=True)
    me.record_arrivals(3.0, 1)
    me.record_arrivals(4.0, 1)
    assert found == [None, None, 2.0, None]


def test_the_device_is_free_once_all_that_it_was_given_has_run() -> None:
    me = pacer()
    first, second = (Running(cls=LONG, shape=[(1000, 0)]) for _ in range(2))
    each_s = me.model.predict(first.shape)
    assert each_s is not None
    assert me.free_s(5.0, []) == 5.0
    first.started, second.started = 5.0, 5.001
    assert me.free_s(5.002, [first, second]) == pytest.approx(5.0 + 2 * each_s)
    first.paused_s = 1.0
    assert me.free_s(5.002, [first, second]) == pytest.approx(6.0 + 2 * each_s)
    assert me.free_s(9.0, [first]) == 9.0


def test_short_requests_go_first_all_of_them_in_their_order() -> None:
    plan = pacer().plan(1.0, [short("a"), short("b")], [long(5000)])
    assert (plan.order, plan.picked, plan.long.picked) == ((SHORT, LONG), (0, 1), (0,))
    assert plan.account.contended


def test_nothing_waits_and_nothing_runs() -> None:
    plan = pacer().plan(1.0, [], [])
    assert plan.order == ()
    assert plan.held != "window"


def test_after_a_short_batch_the_long_class_has_the_gap() -> None:
    me, shorts, longs = pacer(), [short("a")], [long(5000, 1.0)]
    plan = me.plan(1.0, shorts, longs)
    spend(me.gap, 1.0)
    sent = launch(me, 1.0, plan)
    assert me.plan(1.3, shorts, longs).order == (LONG, SHORT), "it is still on the device"
    ended(me, sent, 1.0, 1.01)
    assert me.plan(1.01 + GAP - 1e-6, shorts, longs).order == (LONG, SHORT)
    assert me.plan(1.01 + GAP + 1e-6, shorts, longs).order == (SHORT, LONG)


def test_a_short_batch_preempts_what_is_paused_once_the_gap_is_over() -> None:
    me, shorts = pacer(), [short("a")]
    plan = me.plan(1.0, shorts, [], paused=paused())
    assert (plan.order, plan.picked) == ((SHORT,), (0,))
    spend(me.gap, 1.0)
    run(me, plan, 1.0, 1.01, stock=False, within=True)
    assert me.status(2.0)["preemption"]["by_short_batches"] == 1
    assert me.plan(1.01 + GAP - 1e-6, shorts, [], paused=paused()).order == (), "what is paused goes on"
    assert me.plan(1.01 + GAP + 1e-6, shorts, [], paused=paused()).order == (SHORT,)


def test_a_smaller_overhead_is_a_wider_gap() -> None:
    for overhead in (0.05, 0.5):
        me = pacer(preempt_overhead=overhead)
        plan = me.plan(0.0, [short("a")], [long(5000)])
        spend(me.gap, 0.0)
        run(me, plan, 0.0, 0.01, stock=False)
        opens = 0.01 + F / overhead
        assert me.plan(opens - 1e-6, [short("b")], [long(5000)]).order[0] is LONG
        assert me.plan(opens + 1e-6, [short("b")], [long(5000)]).order[0] is SHORT


def test_a_short_batch_alone_leaves_the_gap_alone() -> None:
    me = pacer()
    run(me, me.plan(0.0, [short("a")], []), 0.0, 0.01, stock=False)
    assert me.plan(0.011, [short("b")], [long(5000)]).order == (SHORT, LONG)


# -- priorities


@pytest.mark.parametrize("paused", [None, paused()])
def test_a_higher_priority_comes_before_the_gap(paused: Paused | None) -> None:
    me, shorts, longs = pacer(), [short("a")], [long(5000)]
    before = me.plan(1.0, shorts, longs, urgent=LONG, paused=paused)
    assert SHORT not in before.order[:1]
    run(me, me.plan(1.0, shorts, longs), 1.0, 1.01, stock=False)
    assert me.plan(1.011, shorts, longs, urgent=SHORT, paused=paused).order[0] is SHORT


# -- memory


def test_room_is_kept_for_a_prompt_that_lacks_it_a_part_of_the_time() -> None:
    me = pacer()
    shorts, longs = [short("a")], [long(20_000, 0.0), long(500, 1.0)]
    for at, kept in ((1.0, True), (1.0 + HOLD_S, False), (0.9 + 4 * HOLD_S, False), (1.0 + 4 * HOLD_S, True)):
        plan = me.plan(at, shorts, longs, lacking=True)
        assert (plan.held == "memory", bool(plan.picked)) == (kept, not kept)
        assert Plan.of(plan.numbers()).held == plan.held
    assert (plan.order, plan.picked, plan.long.picked[0]) == ((LONG,), (), 0)
    beside = me.plan(1.1 + 4 * HOLD_S, shorts, longs, lacking=True, paused=paused())
    assert beside.held == "memory"
    assert (beside.order, beside.picked) == ((), ()), "what is paused goes on and gives its memory back"
    assert me.plan(22.0, shorts, longs).held != "memory", "it has found room"
    assert me.plan(23.0, shorts, [], lacking=True).held != "memory"


def test_short_requests_run_while_other_long_work_gives_its_memory_back() -> None:
    me, shorts, longs = pacer(), [short("a")], [long(500, -60.0), long(400, 1.0)]
    plan = me.plan(1.0, shorts, longs, lacking=True, drains=LONG)
    assert (plan.order, plan.long.picked[0], plan.picked, plan.held) == ((LONG, SHORT), 0, (0,), "")
    beside = me.plan(1.1, [], [longs[0], long(20, 1.0)], lacking=True, drains=LONG, paused=paused())
    assert beside.order == (), "no other prompt takes the memory by overtaking"


@pytest.mark.parametrize("layers", [0, 28])
def test_nobody_joins_a_prompt_that_lacks_memory(layers: int) -> None:
    """Joining requests would take the memory that the prompt lacks."""
    shorts, longs = [short("a")], [long(260, 1.0)] * 60
    assert pacer(layers=layers, chunk=4096).plan(1.0, shorts, longs).mixed
    plan = pacer(layers=layers, chunk=4096).plan(1.0, shorts, longs, lacking=True, drains=LONG)
    assert (plan.mixed, plan.held == "memory", set(plan.order)) == (False, False, {SHORT, LONG})


@pytest.mark.parametrize("layers", [0, 28])
def test_once_all_memory_is_free_it_is_tried_first_and_the_others_if_even_that_is_too_little(layers: int) -> None:
    me, shorts, longs = pacer(layers=layers), [short("a")], [long(300, 1.0), long(500, -60.0)]
    plan = me.plan(1.1, shorts, longs, lacking=True, drains=None)
    assert (plan.order, plan.long.picked[0], plan.mixed, plan.held == "memory") == ((LONG, SHORT), 1, False, False)
    assert plan.picked == (0,)
    assert me.plan(1.1 + HOLD_S, shorts, longs, lacking=True, drains=None).long.picked[0] == 0, "not for ever"


# -- no long work


def test_without_long_work_the_window_decides_as_if_alone() -> None:
    """Compares pacer and separate window on the same arrivals: all numbers are equal."""
    from laps_core.policy.hold import Window

    config = LapsConfig()
    me = Pacer(config, chunk_tokens=CHUNK, layers=LAYERS, model=KNOWN.model())
    window, now, held = Window(config, me.model.predict), 0.0, 0
    came = [1.0 + 4e-4 * i for i in range(6)]
    waiting: list[Waiting] = []
    looked_s: float | None = None
    """Time of the last poll if a batch has left since; requests found now arrived at an unknown time after it."""
    before_s = 0.0
    for _ in range(200):
        now = now if waiting else max(now, came[0])
        arrived = [at for at in came if at <= now]
        came = came[len(arrived) :]
        waiting += [short(at, 50, now) for at in arrived]
        if arrived:
            window.record_arrivals(now, len(arrived), looked_s)
        me.record_arrivals(now, len(arrived))
        before_s, looked_s = now, None
        said = window.decide(now, waiting, token_budget=CHUNK)
        plan = me.plan(now, waiting, [])
        if said.held == "window":
            assert (plan.order, plan.held == "window", plan.account.until_s) == ((), True, said.account.until_s)
            now = min([said.account.until_s, *came[:1]])
            held += 1
            continue
        assert (plan.order, plan.picked, plan.account.reason) == ((SHORT,), said.picked, said.account.reason)
        assert not plan.account.contended
        window.record_dispatch(now, len(said.picked), said.account.waited_s, said.account.reason)
        sent, begin = launch(me, now, plan), now
        looked_s = before_s
        now += F + 50 * TOKEN * len(said.picked)
        window.record_completion(now, len(said.picked))
        ended(me, sent, begin, now)
        waiting = [w for i, w in enumerate(waiting) if i not in said.picked]
        came += [now + 4e-4 * (i + 1) for i in range(len(said.picked))]  # answered clients send their next requests
        came.sort()
    assert me.window.status() == window.status()
    assert held


def test_while_long_work_waits_nothing_is_held() -> None:
    me = pacer(window="fixed", wait_window_ms=50.0)
    assert me.plan(1.0, [short("a", arrival=1.0)], []).held == "window"
    plan = me.plan(1.001, [short("a", arrival=1.0)], [long(5000)])
    assert (plan.order[0], plan.account.reason, plan.held == "window") == (SHORT, "preempt", False)
    assert plan.account.waited_s == pytest.approx(0.001)


# -- the latency model, the status


def fitted(me: Pacer, at: float = 0.0) -> Pacer:
    """Teach the pacer steps that take 1 ms plus 0.1 ms per token, and return it."""
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
            sent = launch(me, at, me.plan(at, [], [long(tokens)]), (tokens, 0), stock=True)
            end = at + took + paused_s
            ended(me, sent, at, end, paused_s)
    for tokens in (100, 500, 2000):
        assert one.model.predict([(tokens, 0)]) == pytest.approx(two.model.predict([(tokens, 0)]), rel=1e-6)


def test_a_step_that_was_measured_on_the_device_alone_ends_where_it_had_begun_or_the_one_before_ended() -> None:
    """In a pipeline the host learns of a step's end only after the last stage, together with that of later steps."""
    me = pacer(known=False)
    sent = [launch(me, at, me.plan(at, [], [long(900)]), (900, 0)) for at in (1.0, 1.1, 3.0)]
    for batch, at in zip(sent, (1.0, 1.1, 3.0), strict=True):
        batch.started, batch.took_s = at, 0.5
    assert [me.record_result(batch, None, 9.0) for batch in sent] == [0.5] * 3
    busy = BusyMeter()
    for begin, end in ((1.0, 1.5), (1.5, 2.0), (3.0, 3.5)):
        busy.add(begin, end)
    assert me.busy.share(4.0) == busy.share(4.0)


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
    assert set(first["preemption"]) == {"gap_ms", "by_short_batches", "by_smaller_prompts", "steps_shared"}
    assert set(first["fairness"]) == {"guard", "credit_s"}


def test_what_preempts_is_bounded_by_the_threshold_in_force() -> None:
    me = pacer(chunk=300, length_threshold="auto")
    me.plan(0.0, [], [long(9000)])
    assert me.threshold_tokens == 200, "the knee; it began with 256"
    shorts = [short("a", 100), short("b", 100), short("c", 50)]
    assert me.plan(0.1, shorts, [long(9000)], paused=paused()).picked == (0, 1)


def test_who_is_answered_in_time_is_counted_by_class() -> None:
    me = pacer()
    me.slo.record(1000.0, SHORT, 1.0, 1.5)
    me.slo.record(1000.0, LONG, 2.0, 1.5)
    me.slo.record(1000.0, LONG, 9.0, None)
    classes = me.status(1000.0)["slo"]["classes"]
    assert {kind: (c["met"], c["missed"]) for kind, c in classes.items()} == {"short": (1, 0), "long": (0, 1)}
    assert me.status(1000.0)["preemption"]["gap_ms"] == pytest.approx(GAP * 1e3)


def test_a_hold_ends_with_the_requests_that_were_held() -> None:
    config = LapsConfig(window="fixed", wait_window_ms=5.0)
    me = Pacer(config, chunk_tokens=CHUNK)
    for forget in (
        lambda now: me.record_empty_queue(),
        lambda now: me.plan(now, [], [Waiting(5000, 0, 0.0)]),
    ):
        me.record_arrivals(1.0, 1)
        assert me.plan(1.0, [Waiting(50, 0, 1.0, None)], []).held == "window"
        forget(1.001)
        me.record_arrivals(600.0, 1)
        later: list[Waiting] = [Waiting(50, 0, 600.0, None)]
        assert me.plan(600.0, later, []).held == "window"
        plan = me.plan(600.006, later, [])
        assert (plan.order, plan.account.reason) == ((SHORT,), "window")
        assert plan.account.waited_s < 0.01
        launch(me, 600.006, plan)
