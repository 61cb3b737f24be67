"""Single decisions of the pool controller."""

from __future__ import annotations

import math

import pytest
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import LEAST_GAIN, PoolController
from laps_core.pools.pressure import IDLE_PRESSURE, InstanceSignals, Work, pool_pressure, pressure
from laps_core.protocol import Load

CONFIG = AllocConfig(initial_short=1)
UNIT = CONFIG.load_unit


def signals(
    short: float, long: float, pools: str = "slll", sick: str = "", work: float | None = None
) -> list[InstanceSignals]:
    """Return an instance for each letter of ``pools``, under its pool's pressure. Indices in ``sick`` are unhealthy.
    Busy shares follow the pressures, or ``work`` for short instances."""
    work = short if work is None else work
    return [
        InstanceSignals(
            name=f"{pool}{i}",
            pool="short" if pool == "s" else "long",
            healthy=str(i) not in sick,
            load=Load(backlog_tokens=UNIT * (short if pool == "s" else long), slo_deviation=0.0, busy_share=0.0),
            busy=Work(work / 100, 0.0) if pool == "s" else Work(0.0, long / 100),
        )
        for i, pool in enumerate(pools)
    ]


def observed(
    short: float, long: float, pools: str = "slll", until: float = 20.0, config: AllocConfig = CONFIG
) -> PoolController:
    """Return a controller that has observed these pressures from 0 s on."""
    controller = PoolController(config)
    for i in range(int(until * 4) + 1):
        controller.observe(i / 4, signals(short, long, pools))
    return controller


def test_no_decision_before_first_observation() -> None:
    assert PoolController(CONFIG).decide(100.0) == []


def test_moves_are_one_cooldown_apart() -> None:
    controller, moved = PoolController(CONFIG), []
    for i in range(81):
        now = 100.0 + i / 4
        controller.observe(now, signals(10.0, 1.0, "slllll"))
        if controller.decide(now):
            moved.append(now)
    assert moved == [104.5, 109.0, 113.5, 118.0]


def test_balance_is_clamped_if_no_move_is_possible() -> None:
    for short, long, balance in ((50.0, 1.0, 2 / 3), (1.0, 50.0, 1 / 3)):
        controller = observed(short, long, "sl")
        assert controller.decide(20.0) == []
        assert controller.balance == pytest.approx(balance)


def test_pool_gets_help_until_pressure_has_clearly_fallen() -> None:
    controller = observed(20.0, 1.0)
    controller.observe(20.0, signals(10.0, 1.0, work=20.0))
    controller.observe(20.25, signals(10.0, 1.0, work=20.0))
    assert controller.decide(20.25)
    controller = observed(20.0, 1.0)
    for i in range(9):
        controller.observe(20.0 + i / 4, signals(10.0, 1.0, work=20.0))
    assert controller.decide(22.0) == [], "it is working its backlog off"


@pytest.mark.parametrize("pools", ["sll", "slll", "slllllll", "ssll", "sslllll", "ssslll", "sssslllll"])
def test_moves_minimize_busier_load_if_gain_is_large_enough(pools: str) -> None:
    controller = observed(1.5, 1.0, pools, 200.0, AllocConfig(ratio=1.3, initial_short=1))
    n, m = pools.count("s"), pools.count("l")
    busier = [max(n / (n + k) * 1.5, m / (m - k)) for k in range(m)]
    best = busier.index(min(busier)) if LEAST_GAIN * min(busier) < 1.5 else 0
    assert [m.target for m in controller.decide(200.0)] == ["short"] * best


def test_nearly_full_pool_gets_help_for_smaller_gain() -> None:
    for short, moved in ((60.0, 0), (96.0, 1)):
        # Six servers would each be a sixth less busy than five.
        controller = observed(short, short / 1.6, "sssssllllll", 200.0, AllocConfig(ratio=1.3, initial_short=1))
        assert len(controller.decide(200.0)) == moved


def test_work_change_is_answered_within_one_period() -> None:
    controller = PoolController(CONFIG)
    for now in range(60):
        controller.step(now, signals(1.0, 50.0, "ssssslllll"))
    moved = [controller.step(now, signals(90.0, 1.0, "ssssslllll")) for now in range(60, 70)]
    assert next(i for i, moves in enumerate(moved) if moves) <= CONFIG.interval_s
    assert {m.target for moves in moved for m in moves} == {"short"}


def test_balance_is_smoothed_from_one_half() -> None:
    controller = observed(3.0, 1.0, until=3.0)
    assert controller.balance == pytest.approx(0.75 - 0.25 * math.exp(-3.0 / CONFIG.smoothing_s))


def test_controller_moves_no_server_under_equal_pressure() -> None:
    assert not observed(10.0, 1.0).in_dead_band()
    assert not observed(1.0, 10.0, "ssl").in_dead_band()
    controller = observed(1.0, 1.0)
    assert controller.in_dead_band()
    assert controller.decide(20.0) == []


def test_idle_pools_count_as_balanced() -> None:
    assert observed(IDLE_PRESSURE, 0.0).balance == 0.5
    assert observed(IDLE_PRESSURE * 1.5, 0.0).balance > 0.9


def test_pool_below_n_min_healthy_instances_gets_instance() -> None:
    controller = PoolController(AllocConfig(n_min=2, initial_short=1))
    for now in (0.0, 5.0):
        controller.observe(now, signals(0.0, 0.0, "ssllll", sick="1"))
    (move,) = controller.decide(5.0)
    assert (move.name, move.reason) == ("l2", "short pool has 1 healthy instances, fewer than 2")


def test_move_reason_states_share_of_pressure() -> None:
    for short, long, pools, reason in (
        (30.0, 10.0, "slll", "short work needs 0.3 servers and has 1; 75% of the pressure is there, more than 67%"),
        (10.0, 30.0, "sssl", "long work needs 0.3 servers and has 1; 75% of the pressure is there, more than 67%"),
    ):
        move = observed(short, long, pools, until=80.0).decide(80.0)[0]
        assert move.reason == reason


def test_pressure_inputs_are_clamped() -> None:
    def of(backlog: float, deviation: float, busy: float) -> float:
        load = Load(backlog_tokens=backlog, slo_deviation=deviation, busy_share=busy)
        return pressure(InstanceSignals(name="a", pool="short", load=load), CONFIG)

    assert of(3 * UNIT, -1.0, 2.0) == pytest.approx(3.0 - 0.2)
    assert of(-UNIT, 9.0, -1.0) == pytest.approx(4.0)


def test_instance_pressure_is_capped_by_other_instances() -> None:
    assert pool_pressure([7.0], CONFIG) == 7.0
    assert pool_pressure([9.0, 1.0], CONFIG) == pytest.approx(1.0 + 0.9 * (2.0 - 1.0)), "twice the other"
    assert pool_pressure([9.0, 1.0, 3.0], CONFIG) == pytest.approx(3.0 + 0.8 * (4.0 - 3.0)), "twice the mean of two"
