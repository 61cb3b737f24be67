"""The whole policy without a server: order of batches, pauses, and memory kept for prompts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from laps_core.busy import BusyMeter
from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.policy.memory import HOLD_S
from laps_core.policy.pacer import SOONER, Pacer
from laps_core.policy.predict import LAUNCHES
from laps_core.policy.types import DecodeStep, Paused, Plan, Running, Waiting
from pacers import (
    CHUNK,
    FIXED_S,
    GAP,
    LAYERS,
    PROFILE,
    TOKEN_S,
    end_batch,
    launch_batch,
    long_prompt,
    make_pacer,
    paused_prompt,
    run_batch,
    short_prompt,
    use_up_preemptions,
)

# -- the gap


def test_deadline_overrides_gap_only_if_preemption_saves_deadline() -> None:
    pacer, work = make_pacer(), [long_prompt(50_000, since=1.0)]
    plan = pacer.plan(0.99, [short_prompt("a")], work)
    use_up_preemptions(pacer.gap, 0.99)
    run_batch(pacer, plan, 0.99, 1.0)
    done_s, opens_at = FIXED_S + 50 * TOKEN_S, 1.0 + GAP

    def first(now: float, *deadlines: float | None) -> object:
        return pacer.plan(now, [short_prompt(n, arrival=now, deadline=d) for n, d in enumerate(deadlines)], work).order[
            0
        ]

    assert first(pacer.gap.opens_at(), None) is SHORT, "the gap is over"
    now = 1.01
    assert first(now, now + done_s + 1e-4) is SHORT
    assert first(now, now + done_s - 1e-4) is LONG, "too late for that one, whatever is done"
    assert first(now, opens_at + done_s - 1e-4) is SHORT
    assert first(now, opens_at + done_s + 1e-4) is LONG, "it can wait for the gap"
    assert first(now, None, opens_at + done_s - 1e-4) is SHORT
    assert first(now, None) is LONG
    assert first(1.0 + FIXED_S - 1e-4, 1.02) is LONG, "a step's fixed time is left between two even then"
    assert first(1.0 + FIXED_S + 1e-4, 1.02) is SHORT


def test_deadline_waits_for_end_of_preempting_batch() -> None:
    pacer, shorts, longs = make_pacer(), [short_prompt("a", deadline=2.0)], [long_prompt(5000, 1.0)]
    plan = pacer.plan(1.0, shorts, longs)
    use_up_preemptions(pacer.gap, 1.0)
    launch_batch(pacer, 1.0, plan)
    assert pacer.plan(1.1, shorts, longs).order == (LONG, SHORT)


def test_decision_time_leaves_just_enough_time_to_launch() -> None:
    pacer, running = make_pacer(), Running(cls=LONG, shape=[(1000, 0)], started=5.0)
    took_s = pacer.model.predict(running.shape)
    assert took_s is not None
    assert pacer.decision_time_s(5.0, [running]) == 5.0, "no launch was timed"
    for seconds in (2e-3, 5e-3, 3e-3):
        pacer.sizes.record_launch_time(seconds)
    assert pacer.decision_time_s(5.0, [running]) == pytest.approx(5.0 + (1.0 - SOONER) * took_s - 5e-3)
    assert pacer.decision_time_s(5.0 + took_s, [running]) == 5.0 + took_s
    assert pacer.decision_time_s(5.0, []) == 5.0
    unknown = make_pacer(known=False)
    unknown.sizes.record_launch_time(1e-3)
    assert unknown.decision_time_s(5.0, [running]) == 5.0
    for _ in range(LAUNCHES):
        pacer.sizes.record_launch_time(1e-3)
    assert pacer.sizes.lead_s == 1e-3, "what was slow once is forgotten"


def test_decision_waits_for_decode_step_behind_earlier_batch() -> None:
    pacer, step = make_pacer(), DecodeStep(5.0, 0.02)
    assert pacer.decision_time_s(5.0, [], step) == 5.0, "no launch was timed"
    pacer.sizes.record_launch_time(3e-3)
    assert pacer.decision_time_s(5.0, [], step) == pytest.approx(5.0 + (1.0 - SOONER) * 0.02 - 3e-3)
    assert pacer.decision_time_s(5.0, [], DecodeStep(5.0, 0.0)) == 5.0, "no step was measured"
    pacer.record_decode_step(4.99, 5.01, None)
    assert pacer.free_s(5.0, [], step) == pytest.approx(5.03)
    assert pacer.decision_time_s(5.01, [], step) == pytest.approx(5.03 - SOONER * 0.02 - 3e-3)


def test_arrivals_seen_after_busy_round_report_last_poll_time() -> None:
    found: list[float | None] = []
    pacer = make_pacer()

    def arrived(now: float, n: int = 1, since: float | None = None) -> None:
        found.append(since)

    pacer.window.record_arrivals = arrived  # type: ignore[assignment, method-assign]
    pacer.record_arrivals(1.0, 1)
    pacer.record_arrivals(2.0, 1, busy=True)
    pacer.record_arrivals(3.0, 1)
    pacer.record_arrivals(4.0, 1)
    assert found == [None, None, 2.0, None]


def test_device_is_free_after_all_running_batches() -> None:
    pacer = make_pacer()
    first, second = (Running(cls=LONG, shape=[(1000, 0)]) for _ in range(2))
    each_s = pacer.model.predict(first.shape)
    assert each_s is not None
    assert pacer.free_s(5.0, []) == 5.0
    first.started, second.started = 5.0, 5.001
    assert pacer.free_s(5.002, [first, second]) == pytest.approx(5.0 + 2 * each_s)
    first.paused_s = 1.0
    assert pacer.free_s(5.002, [first, second]) == pytest.approx(6.0 + 2 * each_s)
    assert pacer.free_s(9.0, [first]) == 9.0


def test_short_requests_go_first_in_order() -> None:
    plan = make_pacer().plan(1.0, [short_prompt("a"), short_prompt("b")], [long_prompt(5000)])
    assert (plan.order, plan.picked, plan.long.picked) == ((SHORT, LONG), (0, 1), (0,))
    assert plan.account.contended


@pytest.mark.parametrize("longs", [[], [long_prompt(5000)]])
def test_small_requests_of_a_flood_go_before_large_ones(longs: list[Waiting]) -> None:
    flood = [short_prompt(i, 240, arrival=0.1) for i in range(100)] + [short_prompt("s", 10, arrival=0.2)]
    plan = make_pacer().plan(1.0, flood, longs)
    assert 100 in plan.picked
    assert plan.picked[:5] == (0, 1, 2, 3, 4), "the share of those that have waited longest"
    assert sum(flood[i].tokens for i in plan.picked) <= CHUNK


def test_plan_is_empty_without_requests() -> None:
    plan = make_pacer().plan(1.0, [], [])
    assert plan.order == ()
    assert plan.held != "window"


def test_long_class_goes_first_during_gap_after_short_batch() -> None:
    pacer, shorts, longs = make_pacer(), [short_prompt("a")], [long_prompt(5000, 1.0)]
    plan = pacer.plan(1.0, shorts, longs)
    use_up_preemptions(pacer.gap, 1.0)
    sent = launch_batch(pacer, 1.0, plan)
    assert pacer.plan(1.3, shorts, longs).order == (LONG, SHORT), "it is still on the device"
    end_batch(pacer, sent, 1.0, 1.01)
    assert pacer.plan(1.01 + GAP - 1e-6, shorts, longs).order == (LONG, SHORT)
    assert pacer.plan(1.01 + GAP + 1e-6, shorts, longs).order == (SHORT, LONG)


def test_short_batch_preempts_paused_batch_after_gap() -> None:
    pacer, shorts = make_pacer(), [short_prompt("a")]
    plan = pacer.plan(1.0, shorts, [], paused=paused_prompt())
    assert (plan.order, plan.picked) == ((SHORT,), (0,))
    use_up_preemptions(pacer.gap, 1.0)
    run_batch(pacer, plan, 1.0, 1.01, stock=False, within=True)
    assert pacer.status(2.0)["preemption"]["by_short_batches"] == 1
    assert pacer.plan(1.01 + GAP - 1e-6, shorts, [], paused=paused_prompt()).order == (), "what is paused goes on"
    assert pacer.plan(1.01 + GAP + 1e-6, shorts, [], paused=paused_prompt()).order == (SHORT,)


def test_smaller_preempt_overhead_widens_gap() -> None:
    for overhead in (0.05, 0.5):
        pacer = make_pacer(preempt_overhead=overhead)
        plan = pacer.plan(0.0, [short_prompt("a")], [long_prompt(5000)])
        use_up_preemptions(pacer.gap, 0.0)
        run_batch(pacer, plan, 0.0, 0.01, stock=False)
        opens = 0.01 + FIXED_S / overhead
        assert pacer.plan(opens - 1e-6, [short_prompt("b")], [long_prompt(5000)]).order[0] is LONG
        assert pacer.plan(opens + 1e-6, [short_prompt("b")], [long_prompt(5000)]).order[0] is SHORT


def test_short_batch_without_long_work_starts_no_gap() -> None:
    pacer = make_pacer()
    run_batch(pacer, pacer.plan(0.0, [short_prompt("a")], []), 0.0, 0.01, stock=False)
    assert pacer.plan(0.011, [short_prompt("b")], [long_prompt(5000)]).order == (SHORT, LONG)


# -- priorities


def test_class_of_lower_priority_does_not_go_first() -> None:
    for paused in (None, paused_prompt()):
        plan = make_pacer().plan(1.0, [short_prompt("a")], [long_prompt(5000)], urgent=LONG, paused=paused)
        assert SHORT not in plan.order[:1]


def test_urgent_short_requests_go_first_but_pause_a_pass_only_after_the_gap() -> None:
    pacer, shorts, longs = make_pacer(), [short_prompt("a")], [long_prompt(5000)] * 40

    def order(now: float, paused: Paused | None) -> Any:
        return pacer.plan(now, shorts, longs, urgent=SHORT, paused=paused).order

    run_batch(pacer, pacer.plan(1.0, shorts, longs, urgent=SHORT), 1.0, 1.01, stock=False)
    assert order(1.01, paused_prompt()) == (SHORT,), "some preemptions are saved up"
    use_up_preemptions(pacer.gap, 1.01)
    assert order(1.011, None) == (SHORT, LONG)
    assert order(1.01 + GAP - 1e-6, paused_prompt()) == ()
    assert order(1.01 + GAP + 1e-6, paused_prompt()) == (SHORT,), "however many long prompts pay for the step"


# -- memory


def test_memory_is_held_part_of_time_for_lacking_prompt() -> None:
    pacer = make_pacer()
    shorts, longs = [short_prompt("a")], [long_prompt(20_000, 0.0), long_prompt(500, 1.0)]
    for at, kept in ((1.0, True), (1.0 + HOLD_S, False), (0.9 + 4 * HOLD_S, False), (1.0 + 4 * HOLD_S, True)):
        plan = pacer.plan(at, shorts, longs, lacking=True)
        assert (plan.held == "memory", bool(plan.picked)) == (kept, not kept)
        assert Plan.of(plan.numbers()).held == plan.held
    assert (plan.order, plan.picked, plan.long.picked[0]) == ((LONG,), (), 0)
    beside = pacer.plan(1.1 + 4 * HOLD_S, shorts, longs, lacking=True, paused=paused_prompt())
    assert beside.held == "memory"
    assert (beside.order, beside.picked) == ((), ()), "what is paused goes on and gives its memory back"
    assert pacer.plan(22.0, shorts, longs).held != "memory", "it has found room"
    assert pacer.plan(23.0, shorts, [], lacking=True).held != "memory"


def test_short_requests_run_while_long_work_frees_memory() -> None:
    pacer, shorts, longs = make_pacer(), [short_prompt("a")], [long_prompt(500, -60.0), long_prompt(400, 1.0)]
    plan = pacer.plan(1.0, shorts, longs, lacking=True, drains=LONG)
    assert (plan.order, plan.long.picked[0], plan.picked, plan.held) == ((LONG, SHORT), 0, (0,), "")
    beside = pacer.plan(1.1, [], [longs[0], long_prompt(20, 1.0)], lacking=True, drains=LONG, paused=paused_prompt())
    assert beside.order == (), "no other prompt takes the memory by overtaking"


@pytest.mark.parametrize("layers", [0, 28])
def test_short_requests_do_not_join_prompt_that_lacks_memory(layers: int) -> None:
    """Joining requests would take the memory that the prompt lacks."""
    shorts, longs = [short_prompt("a")], [long_prompt(260, 1.0)] * 60
    assert make_pacer(layers=layers, chunk=4096).plan(1.0, shorts, longs).mixed
    plan = make_pacer(layers=layers, chunk=4096).plan(1.0, shorts, longs, lacking=True, drains=LONG)
    assert (plan.mixed, plan.held == "memory", set(plan.order)) == (False, False, {SHORT, LONG})


@pytest.mark.parametrize("layers", [0, 28])
def test_lacking_prompt_leads_once_when_all_memory_is_free(layers: int) -> None:
    pacer, shorts, longs = (
        make_pacer(layers=layers),
        [short_prompt("a")],
        [long_prompt(300, 1.0), long_prompt(500, -60.0)],
    )
    plan = pacer.plan(1.1, shorts, longs, lacking=True, drains=None)
    assert (plan.order, plan.long.picked[0], plan.mixed, plan.held == "memory") == ((LONG, SHORT), 1, False, False)
    assert plan.picked == (0,)
    assert pacer.plan(1.1 + HOLD_S, shorts, longs, lacking=True, drains=None).long.picked[0] == 0, "not for ever"


# -- no long work


def test_pacer_matches_separate_window_without_long_work() -> None:
    """Compares pacer and separate window on the same arrivals: all numbers are equal."""
    from laps_core.policy.hold import Window

    config = LapsConfig()
    pacer = Pacer(config, chunk_tokens=CHUNK, layers=LAYERS, model=PROFILE.model())
    window, now, held = Window(config, pacer.model.predict), 0.0, 0
    came = [1.0 + 4e-4 * i for i in range(6)]
    waiting: list[Waiting] = []
    looked_s: float | None = None
    """Time of the last poll if a batch has left since; requests found now arrived at an unknown time after it."""
    before_s = 0.0
    for _ in range(200):
        now = now if waiting else max(now, came[0])
        arrived = [at for at in came if at <= now]
        came = came[len(arrived) :]
        waiting += [short_prompt(at, 50, now) for at in arrived]
        if arrived:
            window.record_arrivals(now, len(arrived), looked_s)
        pacer.record_arrivals(now, len(arrived))
        before_s, looked_s = now, None
        said = window.decide(now, waiting, token_budget=CHUNK)
        plan = pacer.plan(now, waiting, [])
        if said.held == "window":
            assert (plan.order, plan.held == "window", plan.account.until_s) == ((), True, said.account.until_s)
            now = min([said.account.until_s, *came[:1]])
            held += 1
            continue
        assert (plan.order, plan.picked, plan.account.reason) == ((SHORT,), said.picked, said.account.reason)
        assert not plan.account.contended
        window.record_dispatch(now, len(said.picked), said.account.waited_s, said.account.reason)
        sent, begin = launch_batch(pacer, now, plan), now
        looked_s = before_s
        now += FIXED_S + 50 * TOKEN_S * len(said.picked)
        window.record_completion(now, len(said.picked))
        end_batch(pacer, sent, begin, now)
        waiting = [w for i, w in enumerate(waiting) if i not in said.picked]
        came += [now + 4e-4 * (i + 1) for i in range(len(said.picked))]  # answered clients send their next requests
        came.sort()
    assert pacer.window.status() == window.status()
    assert held


def test_window_holds_no_batch_while_long_work_waits() -> None:
    pacer = make_pacer(window="fixed", wait_window_ms=50.0)
    assert pacer.plan(1.0, [short_prompt("a", arrival=1.0)], []).held == "window"
    plan = pacer.plan(1.001, [short_prompt("a", arrival=1.0)], [long_prompt(5000)])
    assert (plan.order[0], plan.account.reason, plan.held == "window") == (SHORT, "preempt", False)
    assert plan.account.waited_s == pytest.approx(0.001)


# -- the latency model, the status


def fit_model(pacer: Pacer, at: float = 0.0) -> Pacer:
    """Teach the pacer steps that take 1 ms plus 0.1 ms per token, and return it."""
    for i in range(40):
        tokens = 20 + 40 * (i % 12)
        run_batch(pacer, pacer.plan(at, [short_prompt("a", tokens)], []), at, at + 1e-3 + 1e-4 * tokens, (tokens, 0))
        at += 0.1
    assert pacer.model.fitted
    return pacer


def test_pause_time_does_not_affect_latency_model() -> None:
    one, two = make_pacer(known=False), make_pacer(known=False)
    for i in range(40):
        tokens, at = 300 + 40 * (i % 12), float(i)
        took = 1e-3 + 1e-4 * tokens
        for pacer, paused_s in ((one, 0.0), (two, 0.125)):
            sent = launch_batch(pacer, at, pacer.plan(at, [], [long_prompt(tokens)]), (tokens, 0), stock=True)
            end = at + took + paused_s
            end_batch(pacer, sent, at, end, paused_s)
    for tokens in (100, 500, 2000):
        assert one.model.predict([(tokens, 0)]) == pytest.approx(two.model.predict([(tokens, 0)]), rel=1e-6)


def test_measured_step_begins_at_launch_or_previous_end() -> None:
    """In a pipeline the host learns of a step's end only after the last stage, together with that of later steps."""
    pacer = make_pacer(known=False)
    sent = [launch_batch(pacer, at, pacer.plan(at, [], [long_prompt(900)]), (900, 0)) for at in (1.0, 1.1, 3.0)]
    for batch, at in zip(sent, (1.0, 1.1, 3.0), strict=True):
        batch.started, batch.took_s = at, 0.5
    assert [pacer.record_result(batch, None, 9.0) for batch in sent] == [0.5] * 3
    busy = BusyMeter()
    for begin, end in ((1.0, 1.5), (1.5, 2.0), (3.0, 3.5)):
        busy.add(begin, end)
    assert pacer.busy.share(4.0) == busy.share(4.0)


def serve_contending_prompts(pacer: Pacer) -> None:
    plan = pacer.plan(4.0, [short_prompt("b")], [long_prompt(20_000, 3.0), long_prompt(400, 3.5)])
    launch_batch(pacer, 4.0, plan)
    run_batch(
        pacer, pacer.plan(4.1, [], [long_prompt(400, 3.5)], paused=paused_prompt(0.5)), 4.1, 4.2, (400, 0), within=True
    )


@pytest.mark.parametrize("work", [lambda pacer: None, serve_contending_prompts])
def test_status_does_not_change_pacer(work: Callable[[Pacer], None]) -> None:
    pacer = make_pacer(known=False, length_threshold="auto", wait_window_ms=5.0, ttft_slo_ms=400.0)
    fit_model(pacer)
    work(pacer)
    pacer.slo.record(4.0, "short", 0.7, 0.4)
    before = pickle.dumps(pacer)
    first = pacer.status(5.0)
    pacer.status(500.0)
    assert pickle.dumps(pacer) == before
    assert pacer.status(5.0) == first
    assert set(first["preemption"]) == {"gap_ms", "by_short_batches", "by_smaller_prompts", "steps_shared"}
    assert set(first["fairness"]) == {"guard", "credit_s"}


def test_preempting_batch_is_bounded_by_current_threshold() -> None:
    pacer = make_pacer(chunk=300, length_threshold="auto")
    pacer.plan(0.0, [], [long_prompt(9000)])
    assert pacer.threshold_tokens == 200, "the knee; it began with 256"
    shorts = [short_prompt("a", 100), short_prompt("b", 100), short_prompt("c", 100)]
    assert pacer.plan(0.1, shorts, [long_prompt(9000)], paused=paused_prompt()).picked == (0, 1)


def test_slo_status_counts_met_and_missed_by_class() -> None:
    pacer = make_pacer()
    pacer.slo.record(1000.0, SHORT, 1.0, 1.5)
    pacer.slo.record(1000.0, LONG, 2.0, 1.5)
    pacer.slo.record(1000.0, LONG, 9.0, None)
    classes = pacer.status(1000.0)["slo"]["classes"]
    assert {kind: (c["met"], c["missed"]) for kind, c in classes.items()} == {"short": (1, 0), "long": (0, 1)}
    assert pacer.status(1000.0)["preemption"]["gap_ms"] == pytest.approx(GAP * 1e3)


def test_window_hold_ends_when_held_requests_are_gone() -> None:
    config = LapsConfig(window="fixed", wait_window_ms=5.0)
    pacer = Pacer(config, chunk_tokens=CHUNK)
    for forget in (
        lambda now: pacer.record_empty_queue(),
        lambda now: pacer.plan(now, [], [Waiting(5000, 0, 0.0)]),
    ):
        pacer.record_arrivals(1.0, 1)
        assert pacer.plan(1.0, [Waiting(50, 0, 1.0, None)], []).held == "window"
        forget(1.001)
        pacer.record_arrivals(600.0, 1)
        later: list[Waiting] = [Waiting(50, 0, 600.0, None)]
        assert pacer.plan(600.0, later, []).held == "window"
        plan = pacer.plan(600.006, later, [])
        assert (plan.order, plan.account.reason) == ((SHORT,), "window")
        assert plan.account.waited_s < 0.01
        launch_batch(pacer, 600.006, plan)
