"""Division of the fleet into two pools or none, decided from measured work, and number of moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import LAYOUT_PERIODS, Move, PoolController
from laps_core.pools.demand import BusySplit
from laps_core.pools.layout import LEAST, layout, short_servers, wait
from laps_core.pools.outlook import Learnt, Outlook
from laps_core.pools.pressure import BOTH, POOLS, InstanceSignals, Work
from laps_core.protocol import Assignment, ByClass, Load

PERIOD_S = 5.0
LAPS, STOCK = True, False


def test_wait_grows_with_load_and_shrinks_with_servers() -> None:
    assert wait(0.0, 3) == 0.0
    assert wait(1.0, 1) == wait(2.5, 2) == float("inf")
    assert wait(0.5, 1) == pytest.approx(1.0), "M/M/1"
    assert wait(4.0, 8) < wait(1.0, 2) < wait(0.5, 1)


@pytest.mark.parametrize(
    ("short", "long", "servers", "parks", "divided"),
    [
        (0.3, 1.6, 2, LAPS, False),
        (0.3, 1.6, 2, STOCK, False),
        (0.9, 1.0, 2, LAPS, False),
        (0.9, 1.4, 3, LAPS, True),
        (0.9, 1.4, 3, STOCK, True),
        (0.3, 1.0, 3, LAPS, False),
        (0.8, 0.8, 8, LAPS, False),
        (0.8, 0.8, 8, STOCK, False),
        (1.2, 1.9, 4, STOCK, False),
        (0.3, 3.4, 4, STOCK, False),
    ],
)
def test_layout_divides_fleet_only_if_pools_pay_off(
    short: float, long: float, servers: int, parks: bool, divided: bool
) -> None:
    found, reason = layout(Work(short, long), servers, 1, parks=parks, divided=False)
    assert (found is not None) == divided, reason


@given(st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.integers(2, 16), st.booleans())
def test_newly_divided_fleet_is_not_merged_at_once(short: float, long: float, servers: int, parks: bool) -> None:
    found, _ = layout(Work(short, long), servers, 1, parks=parks, divided=False)
    if found is not None:
        assert 1 <= found < servers
        assert layout(Work(short, long), servers, 1, parks=parks, divided=True)[0] is not None


class Fleet:
    """Servers that share the work of their pools equally; work beyond their capacity waits."""

    def __init__(self, n: int, pools: str = "", *, parks: bool = True, **config: object) -> None:
        self.config = AllocConfig(interval_s=PERIOD_S, **config)  # type: ignore[arg-type]
        self.controller = PoolController(self.config)
        names: dict[str, Assignment] = {"s": "short", "l": "long", "b": BOTH}
        self.pool = {f"p{i:02}": names[(pools or "b" * n)[i]] for i in range(n)}
        self.parks, self.now = parks, 0.0
        self.waiting = dict.fromkeys(self.pool, Work())
        self.decisions: list[tuple[float, int, str]] = []

    def count(self, pool: Assignment) -> int:
        return list(self.pool.values()).count(pool)

    def run(self, periods: float, short: float, long: float) -> None:
        for _ in range(round(periods * 5)):
            self.now += self.config.sample_s
            signals = []
            for name, pool in self.pool.items():
                of = Work(*(
                    need / max(1, self.count(p) + self.count(BOTH)) if pool in (p, BOTH) else 0.0
                    for p, need in zip(POOLS, (short, long), strict=True)
                ))  # fmt: skip
                over = max(1.0, of.short + of.long)
                busy = Work(of.short / over, of.long / over)
                was = self.waiting[name]
                spare = max(0.0, 1.0 - of.short - of.long)
                more = (self.config.sample_s * (a - b) for a, b in zip(of, busy, strict=True))
                new = Work(*(max(0.0, w + m - spare * self.config.sample_s) for w, m in zip(was, more, strict=True)))
                self.waiting[name] = new
                load = Load(backlog_tokens=10_000 * sum(new), slo_deviation=0.0, busy_share=busy.short + busy.long)
                signals.append(InstanceSignals(
                    name=name, pool=pool, load=load, busy=busy, waiting=new, parks=self.parks
                ))  # fmt: skip
            moves = self.controller.step(self.now, signals)
            for move in moves:
                assert self.pool[move.name] == move.source
                self.pool[move.name] = move.target
            if moves:
                self.decisions.append((self.now, len(moves), moves[0].reason))


@pytest.mark.parametrize("n", [8, 16, 64])
@pytest.mark.parametrize(("before", "after"), [((0.45, 0.15), (0.05, 0.55)), ((0.05, 0.55), (0.45, 0.15))])
def test_mix_change_is_followed_within_three_periods(
    n: int, before: tuple[float, float], after: tuple[float, float]
) -> None:
    """``before``, ``after``: shares of the fleet that short and long work need."""
    short = round(n * before[0] / sum(before))
    fleet = Fleet(n, "s" * short + "l" * (n - short), initial_short=1)
    fleet.run(20, *(n * x for x in before))
    assert not fleet.decisions
    changed = fleet.now
    fleet.run(20, *(n * x for x in after))
    assert fleet.decisions
    assert fleet.decisions[-1][0] - changed <= 3 * PERIOD_S
    needed = abs(n * after[0] / sum(after) - short)
    assert sum(moves for _, moves, _ in fleet.decisions) <= needed + 1


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 16), st.floats(0.02, 0.95), st.floats(0.02, 0.98), st.booleans())
def test_steady_load_causes_no_further_moves(n: int, load: float, share: float, parks: bool) -> None:
    fleet = Fleet(n, parks=parks)
    fleet.run(40, n * load * share, n * load * (1 - share))
    before = len(fleet.decisions)
    fleet.run(40, n * load * share, n * load * (1 - share))
    assert len(fleet.decisions) == before


def test_fleet_is_divided_and_merged_with_reason() -> None:
    fleet = Fleet(3, parks=False)
    fleet.run(20, 0.9, 1.3)
    ((at, moves, _),) = fleet.decisions
    assert moves == 3
    assert at >= LAYOUT_PERIODS * PERIOD_S
    assert fleet.decisions[0][2].startswith("divided: short work needs 0.")
    assert (fleet.count("short"), fleet.count("long")) == (1, 2)
    fleet.run(20, 0.3, 0.2)
    assert fleet.count(BOTH) == 3
    assert fleet.decisions[-1][2].startswith("merged: ")


def test_configured_division_is_kept_and_includes_new_server() -> None:
    fleet = Fleet(4, "slbl", initial_short=1)
    fleet.run(10, 0.01, 0.01)
    assert fleet.count(BOTH) == 0
    assert fleet.count("short") >= 1


def test_busy_time_is_split_by_report_or_own_work() -> None:
    outlook, spent = Outlook(Learnt()), BusySplit()
    spent.since(0.0, 0.0, ByClass(short=1.0, long=2.0), outlook)
    assert spent.since(2.0, 0.0, ByClass(short=1.5, long=3.0), outlook) == Work(0.25, 0.5)
    assert spent.since(3.0, 0.0, ByClass(short=0.1, long=0.2), outlook) == Work(), "it was started again"
    for cls, work_s in (("short", 0.1), ("long", 0.3)):
        outlook.enter(3.0, cls, work_s)  # type: ignore[arg-type]
        outlook.leave(4.0, cls, work_s, 10)  # type: ignore[arg-type]
    assert spent.since(5.0, 0.8, None, outlook) == (pytest.approx(0.2), pytest.approx(0.6))


@pytest.mark.parametrize(
    ("need", "servers", "n_min", "short"),
    [
        (Work(), 9, 1, 4),
        (Work(1.4, 2.0), 4, 1, 2),
        (Work(2.9, 1.0), 4, 1, 3),
        (Work(2.1, 5.9), 8, 1, 2),
        (Work(0.1, 5.0), 8, 2, 2),
        (Work(5.0, 0.1), 8, 2, 6),
    ],
)
def test_pool_sizes_minimize_load_of_busier_pool(need: Work, servers: int, n_min: int, short: int) -> None:
    assert short_servers(need, servers, n_min) == short


@pytest.mark.parametrize(
    ("need", "servers", "n_min", "reason"),
    [
        (Work(1.6, 2.0), 3, 2, "3 servers are too few for two pools"),
        (Work(1.5, 2.4), 4, 2, "short work needs 1.5 of a server"),
        (Work(1.7, 2.1), 4, 2, "2 + 2 servers cannot do the work of 1.7 + 2.1 servers"),
        (Work(1.0, 1.6), 3, 1, "1 + 2 servers cannot do the work of 1.0 + 1.6 servers"),
        (Work(3.5, 0.4), 4, 1, "3 + 1 servers cannot do the work of 3.5 + 0.4 servers"),
        (Work(0.9, 0.2), 4, 1, "1.1 of 4 servers are enough for all requests"),
    ],
)
def test_undivided_layout_states_reason(need: Work, servers: int, n_min: int, reason: str) -> None:
    assert layout(need, servers, n_min, parks=True, divided=False) == (None, reason)


def test_short_work_of_nearly_one_server_gets_pool() -> None:
    assert layout(Work(LEAST, 1.4), 3, 1, parks=LAPS, divided=False)[0] == 1
    # A divided fleet stays divided down to less short work.
    for short, divided in ((0.7, True), (0.5, False)):
        assert (layout(Work(short, 1.4), 3, 1, parks=LAPS, divided=True)[0] is not None) == divided


# Decisions of the controller.


def make_signals(pools: str, need: Work, *, parks: bool = True) -> list[InstanceSignals]:
    """Return an instance for each letter (s, l, or b for both). The first one counts all arriving work (servers)."""
    names: dict[str, Assignment] = {"s": "short", "l": "long", "b": BOTH}
    return [
        InstanceSignals(name=f"{letter}{i}", pool=names[letter], busy=Work() if i else need, parks=parks)
        for i, letter in enumerate(pools)
    ]


def steps(pools: str, needs: Iterable[Work], start_s: float = 0.0, n_min: int = 1) -> list[Move]:
    """Return the first moves of a fleet with this arriving work in each second."""
    made = PoolController(AllocConfig(n_min=n_min), start_s)
    beats = (made.step(start_s + i, make_signals(pools, need)) for i, need in enumerate(needs))
    return next((moves for moves in beats if moves), [])


def moves_after_400_s(pools: str, need: Work, *, parks: bool = True, **config: Any) -> dict[str, Assignment]:
    """Return the moves after 400 s of this work."""
    made = PoolController(AllocConfig(**config))
    for now in range(400):
        made.observe(float(now), make_signals(pools, need, parks=parks))
    return {move.name: move.target for move in made.decide(399.0)}


def test_first_layout_uses_work_of_first_periods() -> None:
    """The mean starts at zero, so 1 - 1/e of the work counts by then. A period earlier would have sufficed, too."""
    moves = steps("bbb", [Work(1.55, 2.6)] * 60, 1000.0)
    assert [move.at for move in moves] == [1000.0 + LAYOUT_PERIODS * PERIOD_S] * 3
    assert moves[0].reason == "divided: short work needs 1.0 of 3 servers, long work 1.6"


def test_layout_of_settled_fleet_is_checked_every_period() -> None:
    moves = steps("bbb", [Work(0.01, 0.01)] * 31 + [Work(4.2, 6.4)] * 20)
    assert {move.at for move in moves} == {35.0}


@pytest.mark.parametrize(("pools", "need"), [("bbl", Work(0.7, 1.6)), ("bbsl", Work(0.7, 2.7)), ("bbbl", Work())])
def test_fleet_divided_by_half_or_less_counts_as_undivided(pools: str, need: Work) -> None:
    if any(need):
        kept = [layout(need, len(pools), 1, parks=LAPS, divided=divided)[0] for divided in (False, True)]
        assert kept == [None, 1], "one that is divided would stay so"
    stray = {f"{letter}{i}": BOTH for i, letter in enumerate(pools) if letter != "b"}
    assert moves_after_400_s(pools, need) == stray


def test_division_needs_twice_n_min_servers() -> None:
    assert sorted(moves_after_400_s("bbbb", Work(1.6, 1.2), parks=STOCK, n_min=2).values()) == [
        "long",
        "long",
        "short",
        "short",
    ]
    assert moves_after_400_s("bbb", Work(1.5, 1.4), n_min=2, initial_short=1) == {}


def test_new_server_joins_smaller_pool() -> None:
    for pools, target in (("ssb", "long"), ("llb", "short"), ("sllb", "short")):
        assert moves_after_400_s(pools, Work(1.0, 1.0), initial_short=1) == {f"b{len(pools) - 1}": target}
