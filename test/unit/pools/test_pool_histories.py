"""The controller under random histories: huge prompts, servers that come and go, missed answers.

``LAPS_HISTORIES=10000 pytest --timeout 0`` tries 10,000 histories; the default is 60.
"""

from __future__ import annotations

import math
import os
import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.histogram import LengthCount
from laps_core.latency.step import Coefficients
from laps_core.length import SHORT, ClassName
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import PoolController
from laps_core.pools.demand import BusySplit
from laps_core.pools.outlook import Learnt, Outlook
from laps_core.pools.pressure import BOTH, POOLS, InstanceSignals, Work
from laps_core.protocol import Assignment, ByClass, Load

MODEL = Coefficients(alpha=1e-10, linear=1.2e-5, gamma_r=1e-9, per_request=1e-4, fixed=4e-3)
"""Latency model in which a prompt of a million tokens takes 112 s."""
HISTORIES = int(os.environ.get("LAPS_HISTORIES", "60"))


class Server:
    """Server that runs its prompts in order, in steps. ``tells``: the server reports counts and busy time by class."""

    def __init__(self, name: str, pool: Assignment, rng: random.Random, learnt: Learnt) -> None:
        self.name, self.pool, self.rng = name, pool, rng
        self.tells, self.healthy = rng.random() < 0.6, True
        self.outlook, self.spent = Outlook(learnt), BusySplit()
        self.outlook.own_model = MODEL if self.tells else None
        self.wrong = rng.choice((0.5, 1.0, 3.0))
        """Ratio of true to predicted times."""
        self.queue: deque[tuple[ClassName, float, int, float]] = deque()
        self.signals: InstanceSignals | None = None
        self.start(0.0)

    def start(self, now: float) -> None:
        """Restart the server; all its requests fail."""
        for cls, _, _, work_s in self.queue:
            self.outlook.leave(now, cls, work_s, 0)
        self.queue.clear()
        self.started, self.lengths, self.step_s, self.busy = now, LengthCount(), 0.0, dict.fromkeys(POOLS, 0.0)

    def send(self, now: float, new: int, cached: int) -> None:
        cls: ClassName = SHORT if new <= 256 else "long"
        work_s = self.outlook.model.work_s(new, cached)
        self.outlook.enter(now, cls, work_s)
        self.lengths.add(new, cached)
        self.queue.append((cls, self.wrong * (MODEL.work_s(new, cached) + MODEL.fixed), new, work_s))

    def run(self, now: float, seconds: float) -> None:
        left = seconds
        while self.queue and left > 0.0:
            cls, rest, new, work_s = self.queue.popleft()
            did = min(left, rest)
            left -= did
            self.step_s += did
            # A step is reported when it ends.
            if self.step_s > 2.0 or did == rest:
                self.busy[cls] += self.step_s
                self.step_s = 0.0
            if rest > did:
                self.queue.appendleft((cls, rest - did, new, work_s))
            else:
                self.outlook.leave(now + seconds - left, cls, work_s, new)
        self.share = 1.0 - left / seconds if seconds else 0.0

    def ask(self, now: float) -> None:
        o, told = self.outlook, None
        at = now
        if self.tells:
            at = now - self.started
            o.arrivals.add_counts(self.lengths.to_lengths(at), MODEL, 256)
            waits = {c: sum(rest for cls, rest, *_ in self.queue if cls == c) for c in POOLS}
            o.record_work(now, waits["short"], waits["long"])
            told = ByClass(**self.busy)
        tokens = float(sum(new for _, _, new, _ in self.queue))
        self.signals = InstanceSignals(
            name=self.name, pool=self.pool, outstanding=tokens, busy=self.spent.since(at, self.share, told, o),
            load=Load(backlog_tokens=tokens, slo_deviation=self.rng.random(), busy_share=self.share),
            arrived=o.arrivals.since(at), waiting=o.waiting(now), parks=self.tells,
        )  # fmt: skip


@settings(max_examples=HISTORIES)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 12), divided=st.booleans(), n_min=st.integers(1, 3))
def test_random_histories_keep_work_finite_and_non_negative(seed: int, n: int, divided: bool, n_min: int) -> None:
    rng, learnt = random.Random(seed), Learnt()
    names = iter(range(10_000))
    start: Assignment = "long" if divided else BOTH

    def server() -> Server:
        return Server(f"p{next(names)}", start, rng, learnt)

    servers = [server() for _ in range(n)]
    controller = PoolController(AllocConfig(n_min=n_min, initial_short=1 if divided else None), rng.uniform(0.0, 1e6))
    now = rng.uniform(0.0, 1e6)
    rate, flaky = 10 ** rng.uniform(-1.5, 1.5), rng.choice((0.0, 0.05, 0.5))
    for _ in range(60):
        span = rng.choice((1.0, 1.0, 1.0, 0.0, 1e-6, 3.0, 90.0))
        came = min(60, int(rng.expovariate(1.0 / (rate * min(span, 3.0)))) if span else 0)
        able = [s for s in servers if s.healthy]
        for _ in range(came if able else 0):
            new = int(10 ** rng.uniform(0.0, 6.0))
            rng.choice(able).send(now, new, int(10 ** rng.uniform(0.0, 6.0)))
        for s in servers:
            s.run(now, span)
        now += span
        for s in list(servers):
            fate = rng.random()
            if fate < 0.01:
                s.healthy = not s.healthy
            elif fate < 0.013:
                s.start(now)
            elif fate < 0.016 and len(servers) > 1:
                servers.remove(s)
            if s.healthy and rng.random() >= flaky:
                s.ask(now)
        if rng.random() < 0.01:
            servers.append(server())
        signals = [s.signals for s in servers if s.healthy and s.signals is not None]
        by_name = {s.name: s for s in servers}
        for move in controller.step(now, signals):
            by_name[move.name].pool = move.target
        for work in (controller.need, controller.average_work, Work(*controller.raw.values())):
            assert all(0.0 <= x < math.inf for x in work), work
        assert 0.0 <= controller.balance <= 1.0
        assert all(0.0 <= x <= 1.0 + 1e-9 for s in signals for x in (*s.busy, sum(s.busy)))
