"""Rules of the waiting window, one by one."""

from __future__ import annotations

from typing import Any

from laps_core.config import LapsConfig
from laps_core.paper import PaperWindow
from laps_core.policy.hold import Window
from laps_core.policy.types import Plan, Waiting
from windows import MS, approximate, hold_plan, make_window, predict, release_plan, short_prompt


def ask(window: Window, now: float, shorts: list[Waiting], **more: Any) -> Plan:
    return window.decide(now, shorts, **{"token_budget": 8192, **more})


def serve(window: Window, at: float, times: list[float]) -> tuple[float, list[int]]:
    """Play requests that arrive at ``times`` after ``at``, polled at once. Return the end and the batch sizes."""
    pending = sorted(at + t for t in times)
    waiting: list[Waiting] = []
    now, depths = at, []
    while pending or waiting:
        now = max(now, pending[0]) if not waiting else now
        while pending and pending[0] <= now:
            window.record_arrivals(pending[0])
            waiting.append(short_prompt(pending.pop(0)))
        answer = ask(window, now, waiting)
        if answer.held == "window":
            now = min([answer.account.until_s, *pending[:1]])
            continue
        window.record_dispatch(now, len(answer.picked), answer.account.waited_s, answer.account.reason)
        depths.append(len(answer.picked))
        now += predict([(waiting[i].tokens, 0) for i in answer.picked])
        window.record_completion(now, len(answer.picked))
        waiting = [s for i, s in enumerate(waiting) if i not in set(answer.picked)]
    return now, depths


BURST = [0.4 * MS * i for i in range(8)]


def test_learned_burst_is_dispatched_as_one_batch() -> None:
    window, now, seen = make_window(), 0.0, []
    for _ in range(4):
        now, depths = serve(window, now + 0.2, BURST)
        seen.append(depths)
    assert seen[0][0] == 1, "nothing is known yet"
    assert seen[1:] == [[8]] * 3


def test_lone_requests_are_not_held_at_high_rate() -> None:
    window, now = make_window(), 0.0
    for gap in [0.1 * MS, 1 * MS, 30 * MS] * 50:
        now += gap
        window.record_arrivals(now)
        answer = ask(window, now, [short_prompt(now)])
        assert answer == release_plan((0,), "idle")
        window.record_dispatch(now, 1, 0.0, "idle")
        now += 1 * MS
        window.record_completion(now, 1)


def known_bursts(config: LapsConfig, at: float = 1.0) -> tuple[Window, float]:
    """Return a window that expects seven more requests within 3 ms of the first, and the first's arrival time."""
    window, now = make_window(config), at
    for _ in range(3):
        now, _ = serve(window, now + 0.2, BURST)
    now += 0.2
    window.record_arrivals(now)
    return window, now


def test_window_holds_for_expected_burst_until_batch_is_full() -> None:
    window, now = known_bursts(LapsConfig())
    answer = ask(window, now, [short_prompt(now)])
    assert answer.held == "window"
    assert 2 * MS < answer.account.until_s - now < 5 * MS
    window.record_arrivals(now + 1 * MS, 7)
    full = ask(window, now + 1 * MS, [short_prompt(now)] * 8)
    assert full == release_plan(tuple(range(8)), "depth", approximate(1 * MS))


def test_window_dispatches_at_end_if_burst_does_not_arrive() -> None:
    window, now = known_bursts(LapsConfig())
    answer = ask(window, now, [short_prompt(now)])
    assert answer.held == "window"
    after = ask(window, answer.account.until_s, [short_prompt(now)])
    assert after.held != "window"
    assert after.account.reason in ("idle", "window")


def test_window_does_not_hold_past_tight_deadline() -> None:
    window, now = known_bursts(LapsConfig())
    service = predict([(100, 0)])
    assert ask(window, now, [short_prompt(now, deadline=now + service + 1.9 * MS)]) == release_plan((0,), "slack")
    answer = ask(window, now, [short_prompt(now, deadline=now + service + 5 * MS)])
    assert answer.account.until_s <= now + 3 * MS if answer.held == "window" else answer.account.reason == "idle"
    assert window.status()["mode"] == "sla"


def test_late_requests_are_counted_and_keep_order() -> None:
    window = make_window(LapsConfig(wait_window_ms=0.0))
    shorts = [
        short_prompt(0, deadline=-1.0),
        short_prompt(0, deadline=9.0),
        short_prompt(0),
        short_prompt(0, deadline=0.001),
    ]
    answer = ask(window, 0.0, shorts)
    assert answer.held != "window"
    assert answer.picked == (0, 1, 2, 3)
    assert answer.account.late == 2
    window.record_dispatch(0.0, 4, 0.0, answer.account.reason, answer.account.late)
    assert window.status()["late"] == 2


def test_preempting_batch_takes_all_requests_without_hold() -> None:
    window, now = known_bursts(LapsConfig())
    assert ask(window, now, [short_prompt(now)]).held == "window"
    later = now + 1 * MS
    answer = window.decide(
        later, [short_prompt(now), short_prompt(later, deadline=now)], token_budget=8192, contended=True
    )
    assert answer == release_plan((0, 1), "preempt", approximate(1 * MS), late=1)


def test_first_requests_of_crowd_leave_before_others() -> None:
    """A request takes 1 ms beside others, a step 8 ms more: 2 sqrt(64 x 8) of 64 leave, but all of 16."""
    for waiting, leave in ((64, 46), (16, 16)):
        crowd = [short_prompt() for _ in range(waiting)]
        plan = ask(make_window(), 0.0, crowd)
        assert (plan.picked, plan.split) == (tuple(range(leave)), leave < waiting)
        assert len(ask(make_window(), 0.0, crowd, contended=True).picked) == waiting
    assert len(ask(PaperWindow(LapsConfig(), predict), 0.0, [short_prompt() for _ in range(64)]).picked) == 64


def test_zero_window_reports_mode_off() -> None:
    window = make_window(LapsConfig(wait_window_ms=0.0))
    assert serve(window, 0.0, BURST)[1][0] == 1
    assert window.status()["mode"] == "off"


def test_fixed_window_starts_at_first_arrival() -> None:
    window = make_window(LapsConfig(window="fixed"))
    assert ask(window, 1.0, [short_prompt(0.998), short_prompt(0.999)]) == hold_plan(0.998 + 10 * MS)
    assert ask(window, 1.008, [short_prompt(0.998)]) == release_plan((0,), "window", approximate(8 * MS))
    assert ask(window, 1.0, [short_prompt(1.0)] * 8) == release_plan(tuple(range(8)), "depth")


def test_fixed_window_ends_before_deadline() -> None:
    window = make_window(LapsConfig(window="fixed", wait_window_ms=30.0))
    answer = ask(window, 0.0, [short_prompt(0.0, deadline=predict([(100, 0)]) + 6 * MS)])
    assert answer == hold_plan(approximate(4 * MS))


def test_requests_that_fit_token_budget_keep_order() -> None:
    shorts = [short_prompt(tokens=60), short_prompt(tokens=200), short_prompt(tokens=50), short_prompt(tokens=30)]
    assert ask(make_window(), 0.0, shorts, token_budget=300) == release_plan((0, 1, 3), "tokens")
    assert ask(make_window(), 0.0, [short_prompt(tokens=500)], token_budget=150) == release_plan((0,), "tokens")


def test_empty_queue_resets_hold() -> None:
    window, now = known_bursts(LapsConfig())
    assert ask(window, now, [short_prompt(now)]).held == "window"
    window.record_empty_queue()
    answer = ask(window, now + 30 * MS, [short_prompt(now + 30 * MS)])
    assert answer.held != "window"
    assert answer.account.waited_s == 0.0


def test_first_requests_of_backlog_are_not_counted_late() -> None:
    window = make_window()
    batch_s = predict([(100, 0)] * 10)
    # Ten fit into one batch and can be in time; all two hundred in one step could not.
    shorts = [short_prompt(deadline=batch_s + 5 * MS) for _ in range(200)]
    answer = window.decide(0.0, shorts, token_budget=1000)
    assert answer.held != "window"
    assert answer.picked == tuple(range(10))
    assert answer.account.late == 0
