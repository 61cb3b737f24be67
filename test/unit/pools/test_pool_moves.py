"""Number and direction of the moves between pools, by measured work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import PoolController
from laps_core.pools.demand import Demand
from laps_core.pools.pressure import InstanceSignals, Work
from laps_core.protocol import Load

CONFIG = AllocConfig(initial_short=1)
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


def make_controller(
    pools: str, needs: Iterable[Work], pressed: tuple[float, float] = EVEN, config: AllocConfig = CONFIG
) -> PoolController:
    """Return a controller that has observed these needs, one per second from 0 s on."""
    controller = PoolController(config)
    for now, need in enumerate(needs):
        controller.observe(float(now), fleet(pools, need, pressed))
    return controller


def steady(short: float, long: float, samples: int = 21) -> list[Work]:
    return [Work(short, long)] * samples


def test_idle_fleet_gets_no_moves() -> None:
    assert make_controller("ssll", steady(0.0, 0.0, 6), (0.0, 0.0)).decide(5.0) == []


def test_pressure_without_missing_servers_causes_no_move() -> None:
    assert make_controller("ssll", steady(0.5, 0.5), (9.0, 1.0)).in_dead_band()
    assert not make_controller("ssll", steady(1.5, 0.5), (9.0, 1.0)).in_dead_band()


def test_missing_servers_cause_no_move_without_pressure_or_overload() -> None:
    assert make_controller("lsss", steady(0.1, 0.95)).in_dead_band()
    assert not make_controller("lsss", steady(0.1, 0.95), (1.0, 9.0)).in_dead_band()
    assert not make_controller("lsss", steady(0.1, 1.2)).in_dead_band(), "more than it can do"


def test_pool_is_overloaded_only_by_certain_work() -> None:
    """The first load needs 1.05 servers on average, of which 0.08 are uncertain."""
    assert make_controller("sll", [Work(0.8 + 0.5 * (i % 2), 0.1) for i in range(21)]).in_dead_band()
    assert not make_controller("sll", steady(1.05, 0.1)).in_dead_band()


def test_uncertain_work_causes_no_move() -> None:
    assert make_controller("sll", [Work(1.2 * (i % 2), 0.4) for i in range(7)], (9.0, 1.0)).decide(6.0) == []
    assert len(make_controller("sll", steady(0.6, 0.4, 7), (9.0, 1.0)).decide(6.0)) == 1


def test_source_pool_keeps_possibly_needed_servers_at_first() -> None:
    """Two moves would be best, but the long pool's need is known only to 0.6 servers; the second would do 0.5."""
    for seconds, moved in ((5, 1), (10, 2)):
        controller = make_controller("sllll", [Work(1.6, 2.0 * (i % 2)) for i in range(seconds + 1)], (9.0, 1.0))
        assert len(controller.decide(float(seconds))) == moved


def test_suddenly_overloaded_pool_gets_help_after_one_period() -> None:
    controller, moved = PoolController(CONFIG), []
    for now in range(80):
        need = Work(0.5, 1.0) if now < 60 else Work(5.0, 1.0)
        moved += controller.step(float(now), fleet("ssllll", need))
    assert moved[0].at == 64.0, "the sample of 60 s is of the second before"


def test_source_pool_of_one_or_no_server_gives_none() -> None:
    assert make_controller("sl", steady(3.0, 0.1), (9.0, 1.0)).in_dead_band()
    assert make_controller("sss", steady(3.0, 0.0), (9.0, 1.0)).in_dead_band()


def test_empty_pool_gets_server_if_class_has_work() -> None:
    assert not make_controller("lll", steady(0.5, 0.5)).in_dead_band()
    for short, left in ((0.5, False), (0.0, True)):
        controller = make_controller("sll", steady(short, 0.5), (9.0, 1.0))
        controller.observe(21.0, fleet("ll", Work(short, 0.5)))
        assert controller.in_dead_band() == left


def test_source_pool_keeps_n_min_servers() -> None:
    config = AllocConfig(n_min=2, initial_short=1)
    assert len(make_controller("sslll", steady(6.0, 0.1), config=config).decide(20.0)) == 1
    assert len(make_controller("sslllll", steady(6.0, 0.1), config=config).decide(20.0)) == 3


@pytest.mark.parametrize(("wait_s", "name"), [(CONFIG.interval_s, "l1"), (CONFIG.interval_s + 0.1, "l2")])
def test_server_with_more_than_one_period_of_work_stays(wait_s: float, name: str) -> None:
    controller = PoolController(CONFIG)
    for now in range(21):
        controller.observe(float(now), fleet("sll", Work(1.4, 0.1), (9.0, 1.0), (0.0, wait_s)))
    (move,) = controller.decide(20.0)
    assert move.name == name


def test_balance_after_change_uses_only_later_pressures() -> None:
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
