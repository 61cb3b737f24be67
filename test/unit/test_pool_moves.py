"""Number and direction of the moves between pools, by measured work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest
from laps_core.pools.controller import PoolController
from laps_core.pools.demand import Demand
from laps_core.pools.pressure import InstanceSignals, PressureConfig, Work
from laps_core.protocol import Load

CONFIG = PressureConfig(divided=True)
EVEN = 1.0, 1.0


def fleet(
    pools: str, need: Work, pressed: tuple[float, float] = EVEN, waits: Iterable[float] = ()
) -> list[InstanceSignals]:
    """Return an instance for each letter, s or l, under its pool's pressure. ``waits``: waiting long work (seconds).

    The first instance counts all arriving work (servers), because the controller uses the sum.
    """
    return [
        InstanceSignals(
            name=f"{letter}{i}",
            pool="short" if letter == "s" else "long",
            load=Load(backlog_tokens=CONFIG.load_unit * pressed[letter == "l"], slo_deviation=0.0, busy_share=0.0),
            outstanding=i,
            busy=Work() if i else need,
            waiting=Work(0.0, wait),
        )
        for i, (letter, wait) in enumerate(itertools.zip_longest(pools, waits, fillvalue=0.0))
    ]


def seen(
    pools: str, needs: Iterable[Work], pressed: tuple[float, float] = EVEN, config: PressureConfig = CONFIG
) -> PoolController:
    """Return a controller that has observed these needs, one per second from 0 s on."""
    controller = PoolController(config)
    for now, need in enumerate(needs):
        controller.observe(float(now), fleet(pools, need, pressed))
    return controller


def steady(short: float, long: float, samples: int = 21) -> list[Work]:
    return [Work(short, long)] * samples


def test_an_idle_fleet_is_left_alone() -> None:
    assert seen("ssll", steady(0.0, 0.0, 6), (0.0, 0.0)).decide(5.0) == []


def test_pressure_without_missing_servers_calls_for_no_move() -> None:
    assert seen("ssll", steady(0.5, 0.5), (9.0, 1.0)).in_dead_band()
    assert not seen("ssll", steady(1.5, 0.5), (9.0, 1.0)).in_dead_band()


def test_missing_servers_without_pressure_call_for_no_move_while_the_pool_can_do_the_work() -> None:
    assert seen("lsss", steady(0.1, 0.95)).in_dead_band()
    assert not seen("lsss", steady(0.1, 0.95), (1.0, 9.0)).in_dead_band()
    assert not seen("lsss", steady(0.1, 1.2)).in_dead_band(), "more than it can do"


def test_a_pool_is_overloaded_by_what_is_sure_to_come() -> None:
    """The first load needs 1.05 servers on average, of which 0.08 are uncertain."""
    assert seen("sll", [Work(0.8 + 0.5 * (i % 2), 0.1) for i in range(21)]).in_dead_band()
    assert not seen("sll", steady(1.05, 0.1)).in_dead_band()


def test_uncertain_work_calls_for_no_move() -> None:
    assert seen("sll", [Work(1.2 * (i % 2), 0.4) for i in range(7)], (9.0, 1.0)).decide(6.0) == []
    assert len(seen("sll", steady(0.6, 0.4, 7), (9.0, 1.0)).decide(6.0)) == 1


def test_at_first_no_server_leaves_that_may_be_needed() -> None:
    """Two moves would be best, but the long pool's need is known only to 0.6 servers; the second would do 0.5."""
    for seconds, moved in ((5, 1), (10, 2)):
        controller = seen("sllll", [Work(1.6, 2.0 * (i % 2)) for i in range(seconds + 1)], (9.0, 1.0))
        assert len(controller.decide(float(seconds))) == moved


def test_a_pool_that_is_overloaded_all_at_once_gets_help_after_a_period() -> None:
    controller, moved = PoolController(CONFIG), []
    for now in range(80):
        need = Work(0.5, 1.0) if now < 60 else Work(5.0, 1.0)
        moved += controller.step(float(now), fleet("ssllll", need))
    assert moved[0].at == 64.0, "the sample of 60 s is of the second before"


def test_pools_of_one_or_no_server_give_none() -> None:
    assert seen("sl", steady(3.0, 0.1), (9.0, 1.0)).in_dead_band()
    assert seen("sss", steady(3.0, 0.0), (9.0, 1.0)).in_dead_band()


def test_an_empty_pool_calls_for_a_server_if_there_is_work_for_it() -> None:
    assert not seen("lll", steady(0.5, 0.5)).in_dead_band()
    for short, left in ((0.5, False), (0.0, True)):
        controller = seen("sll", steady(short, 0.5), (9.0, 1.0))
        controller.observe(21.0, fleet("ll", Work(short, 0.5)))
        assert controller.in_dead_band() == left


def test_no_more_move_than_the_pool_can_spare() -> None:
    config = PressureConfig(n_min=2, divided=True)
    assert len(seen("sslll", steady(6.0, 0.1), config=config).decide(20.0)) == 1
    assert len(seen("sslllll", steady(6.0, 0.1), config=config).decide(20.0)) == 3


@pytest.mark.parametrize(("wait_s", "name"), [(CONFIG.period_s, "l1"), (CONFIG.period_s + 0.1, "l2")])
def test_a_server_with_work_for_more_than_a_period_does_not_move(wait_s: float, name: str) -> None:
    controller = PoolController(CONFIG)
    for now in range(21):
        controller.observe(float(now), fleet("sll", Work(1.4, 0.1), (9.0, 1.0), (0.0, wait_s)))
    (move,) = controller.decide(20.0)
    assert move.name == name


def test_after_a_change_the_share_is_smoothed_over_what_came_since() -> None:
    controller, demand, changes = PoolController(CONFIG), Demand(CONFIG), []
    for now in range(46):
        # A change of a few times the noise is detected some samples later; the pressures reverse meanwhile.
        need = Work((1.0 if now < 40 else 1.2) + 0.1 * (now % 2), 0.5)
        signals = fleet("sll", need, (3.0, 1.0) if now < 41 else (1.0, 3.0))
        controller.observe(float(now), signals)
        demand.observe(float(now), signals)
        if demand.drop_before_change():
            changes.append((now, demand.span_s))
            before, after = (math.exp(-s / CONFIG.smoothing_s) for s in (41 - (now - demand.span_s), now - 41.0))
            share = 0.75 - 0.25 * before
            assert controller.balance == pytest.approx(0.25 + (share - 0.25) * after)
    ((at, span_s),) = changes
    assert at - span_s < 41.0 < at - 1.0
