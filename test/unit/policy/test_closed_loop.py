"""The waiting window on a toy device with closed-loop clients: deterministic, in virtual time."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from laps_core.config import LapsConfig
from laps_core.policy.hold import Window
from laps_core.policy.types import Plan, Waiting

OFF = LapsConfig(wait_window_ms=0.0)
AWD = LapsConfig()


def plan_empty_queue(window: Window) -> Plan:
    """Return the plan of the window when no request waits."""
    window.record_empty_queue()
    return Plan((), held="window")


@dataclass
class Run:
    """Figures of a run."""

    seconds: float
    ttfts: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    window: Window | None = None

    @property
    def rate(self) -> float:
        return len(self.ttfts) / self.seconds


def closed_loop(
    config: LapsConfig,
    users: int,
    *,
    fixed_s: float,
    per_token_s: float,
    tokens: int = 100,
    think: Callable[[random.Random], float] = lambda r: r.uniform(0.2e-3, 3e-3),
    batches: int = 400,
    seed: int = 0,
    known: bool = True,
    budget: int = 8192,
    noise: float = 0.0,
    poll: bool = False,
) -> Run:
    """Run ``users`` clients; each sends its next request a think time after its last request completed.

    A batch takes fixed_s + per_token_s x tokens, and 0.3 ms pass before the next poll. ``known``: the window can
    predict this time. ``poll``: requests get the time of the poll that finds them as arrival time.
    """
    rng = random.Random(seed)
    clients = [random.Random(f"{seed}/{i}") for i in range(users)]

    def predict(requests: Sequence[tuple[int, int]]) -> float:
        return fixed_s + per_token_s * sum(new for new, _ in requests)

    window = Window(config, predict if known else lambda _: None)
    run = Run(0.0, window=window)
    pending = [(think(clients[i]), i) for i in range(users)]
    heapq.heapify(pending)
    waiting: list[Waiting] = []
    whose: list[int] = []
    now = 0.0
    blind: float | None = None
    for _ in range(batches):
        wake = now
        while True:
            now = max(now, wake)
            while pending and pending[0][0] <= now:
                at, i = heapq.heappop(pending)
                waiting.append(Waiting(tokens, 0, at))
                whose.append(i)
                if poll:
                    window.record_arrivals(now, 1, blind)
                else:
                    window.record_arrivals(at)
            blind = None
            said = window.decide(now, waiting, token_budget=budget) if waiting else plan_empty_queue(window)
            if said.held != "window":
                break
            wake = min([said.account.until_s, *(p[0] for p in pending[:1])])
        batch = [(waiting[i], whose[i]) for i in said.picked]
        left = [i for i in range(len(waiting)) if i not in set(said.picked)]
        waiting, whose = [waiting[i] for i in left], [whose[i] for i in left]
        window.record_dispatch(now, len(batch), said.account.waited_s, said.account.reason)
        run.waits.append(said.account.waited_s)
        run.depths.append(len(batch))
        blind = now
        now += predict([(s.tokens, s.history) for s, _ in batch]) * rng.lognormvariate(0.0, noise)
        window.record_completion(now, len(batch))
        for s, i in batch:
            run.ttfts.append(now - s.since_s)
            heapq.heappush(pending, (now + think(clients[i]), i))
        now += 0.3e-3
    run.seconds = now
    return run


@pytest.mark.parametrize(("fixed_ms", "token_us"), [(0.5, 1.0), (1, 1), (2, 5), (4, 5), (8, 1), (8, 20), (20, 50)])
@pytest.mark.parametrize(("known", "poll"), [(True, False), (False, False), (True, True)])
def test_waiting_window_lowers_throughput_by_at_most_two_percent(
    fixed_ms: float, token_us: float, known: bool, poll: bool
) -> None:
    for users in (1, 4, 8, 16, 32, 64):
        device = partial(
            closed_loop, fixed_s=fixed_ms / 1e3, per_token_s=token_us / 1e6, think=lambda r: r.uniform(0.4e-3, 3e-3)
        )
        off = device(OFF, users)
        awd = device(AWD, users, known=known, poll=poll)
        assert awd.rate >= 0.98 * off.rate, users
        if users == 1:
            assert max(awd.waits) == 0.0
            assert awd.ttfts == off.ttfts


@pytest.mark.parametrize("users", [2, 4, 8])
@pytest.mark.parametrize("poll", [False, True])
def test_waiting_window_gains_if_fixed_cost_dominates(users: int, poll: bool) -> None:
    off, awd = (closed_loop(c, users, fixed_s=8e-3, per_token_s=5e-6, poll=poll) for c in (OFF, AWD))
    assert awd.rate >= 1.05 * off.rate
    assert statistics.median(awd.ttfts) < statistics.median(off.ttfts)


@pytest.mark.parametrize("think_s", [4e-3, 50e-3])
@pytest.mark.parametrize("poll", [False, True])
def test_waiting_window_keeps_throughput_with_slow_clients(think_s: float, poll: bool) -> None:
    for users in (1, 4, 8, 16, 32):
        off, awd = (
            closed_loop(
                config, users, fixed_s=8e-3, per_token_s=5e-6, think=lambda r: think_s + r.expovariate(1 / think_s),
                poll=poll,
            )
            for config in (OFF, AWD)
        )  # fmt: skip
        assert awd.rate >= 0.98 * off.rate, users


def test_more_clients_than_maximum_batch_are_not_waited_for() -> None:
    assert max(closed_loop(AWD, 12, fixed_s=8e-3, per_token_s=5e-6).waits[50:]) == 0.0
