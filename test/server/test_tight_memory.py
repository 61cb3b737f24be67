"""Random permanent load on a small KV pool: no request waits forever. Runs in virtual time, with SGLang's own adder and
without a server."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT
from laps_core.policy.fairness import stretch
from laps_core.policy.memory import HOLD_S
from laps_core.policy.pacer import Pacer
from laps_plan.profile import Profile
from sglang_laps.classes import Classes, Tag
from sglang_laps.core import LapsCore

from .adders import Cache, FcfsPolicy, Grammars, LoadInquirer, Prompt, SingleRank, adder, fill_batch

__all__ = ["adder"]
THRESHOLD = 256
FIXED_S = 6e-3
MODEL = Profile(name="made up", source="this test", coefficients=Coefficients(1e-8, 25e-6, 0.0, 0.0, FIXED_S)).model()
"""Latency model similar to an 8B model on an H200."""
SPAN_S = 20.0


def lone_s(tokens: int) -> float:
    """Return the time of a lone prompt (seconds)."""
    return MODEL.predict([(tokens, 0)]) or 0.0


@dataclass(frozen=True)
class Load:
    """Load of clients of both classes, each with one request at a time, and the server's parameters."""

    chunk: int
    pool: int
    layers: int
    """Layers of the model; 0 for a server without slices."""
    overlap: bool
    """True to process a batch's result after the next batch has been sent."""
    transfer_s: float
    """Time for which a prompt keeps its memory after its last chunk (seconds)."""
    shorts: int
    longs: int
    longest: int

    @classmethod
    def random(cls, seed: int) -> Load:
        rng = random.Random(seed)
        chunk = rng.choice([512, 2048, 8192])
        pool = chunk * rng.choice([2, 2, 4, 8])
        longest = int(pool * rng.choice([0.5, 0.75, 0.95]))
        layers, transfer_s = rng.choice([0, 12, 36]), pool * rng.choice([0.0, 2e-6, 1e-5])
        clients = rng.choice([4, 16, 64]), rng.choice([1, 2, 4])
        return cls(chunk, pool, layers, rng.random() < 0.5, transfer_s, *clients, longest)

    @property
    def long_share(self) -> float:
        """Return the least share of the time for long work (docs/LAPS.md)."""
        gap_s = FIXED_S / LapsConfig().preempt_overhead
        return 1.0 / stretch(gap_s, lone_s(max(THRESHOLD, self.chunk // 2)))


@dataclass
class Virtual:
    """Scheduler of one rank with a virtual clock that advances by the predicted times of its batches."""

    load: Load
    seed: int
    now: float = 0.0
    waiting_queue: list[Any] = field(default_factory=list)
    chunked_req: Any = None
    disagg_prefill_inflight_queue: list[Any] = field(default_factory=list)
    """Prompts whose KV cache is in transfer until ``there_s``."""
    running: list[Any] = field(default_factory=list)
    """Batches whose results are not processed yet."""
    waits_s: dict[str, list[float]] = field(default_factory=lambda: {SHORT: [], LONG: []})
    work_s: float = 0.0
    """Time of long work, without short requests in the same steps (seconds)."""

    page_size = 1
    enable_staging = False
    load_inquirer = LoadInquirer()
    grammar_manager = Grammars()
    policy = FcfsPolicy()

    def __post_init__(self) -> None:
        from sglang_laps.builder import Builder

        alone: Any = SingleRank()
        config = LapsConfig(length_basis="prompt")
        self.rng = random.Random(self.seed)
        self.cache = Cache(1, self.load.pool)
        self.max_total_num_tokens, self.chunked_prefill_size = self.load.pool, self.load.chunk
        pacer = Pacer(config, chunk_tokens=self.load.chunk, layers=self.load.layers, model=MODEL)
        self.core = LapsCore(pacer, Classes(config, THRESHOLD, lambda _: 0, lambda: self.now))
        me: Any = self
        self.builder = Builder(me, self.core, alone, self.stock)
        clients = [SHORT] * self.load.shorts + [LONG] * self.load.longs
        self.coming = [(0.1 * self.rng.random(), i, cls) for i, cls in enumerate(clients)]
        heapq.heapify(self.coming)

    def stock(self, running: Any) -> Any:
        """Build the next batch as SGLang does."""
        make, queue, chunk = self.builder.adder, self.waiting_queue, self.chunked_prefill_size
        made, self.chunked_req = fill_batch(make, self.cache, queue, chunk, self.chunked_req)
        assert self.cache.free >= 0
        reqs = made.can_run_list
        self.waiting_queue = [r for r in self.waiting_queue if r not in reqs]
        batch = SimpleNamespace(
            reqs=reqs, prefill_stats=None, extend_lens=[r.extend_len for r in reqs],
            prefix_lens=[r.prefix_len for r in reqs], ends=[r for r in reqs if r.extend_end == r.seqlen],
            forward_iter=self.core.classes.batches,
        )  # fmt: skip
        return SimpleNamespace(running_batch=running, batch_to_run=batch if reqs else None)

    def take_in(self) -> None:
        """Queue requests that have arrived, and free the memory of prompts whose transfer has ended."""
        while self.coming and self.coming[0][0] <= self.now:
            _, client, cls = heapq.heappop(self.coming)
            low, high = (1, THRESHOLD) if cls == SHORT else (THRESHOLD + 1, self.load.longest)
            req: Any = Prompt(self.rng.randint(low, high))
            req.rid, req.client, req.cls, req.came_s = str(client), client, cls, self.now
            req.seqlen = len(req.full_untruncated_fill_ids)
            req.laps_tag = Tag(self.now, self.now, None, new_tokens=req.seqlen)
            self.waiting_queue.append(req)
        arrived = [r for r in self.disagg_prefill_inflight_queue if r.there_s <= self.now]
        self.disagg_prefill_inflight_queue = [r for r in self.disagg_prefill_inflight_queue if r.there_s > self.now]
        self.cache.free += sum(r.seqlen for r in arrived)

    def run(self, batch: Any) -> None:
        """Run a batch; a batch of long work runs in slices."""
        flight: Any = self.core.take_next()
        flight.started = self.now
        took_s = MODEL.predict(flight.shape) or 0.0
        left, step = self.load.layers, flight.layers
        if step:
            self.core.under_way.append(flight)
            while left > step:
                left -= step
                self.now += took_s * step / self.load.layers
                self.process()
                self.take_in()
                while (built := self.build(self.core.paused(flight, left, self.load.layers))) is not None:
                    self.run(built)
            self.core.under_way.remove(flight)
        self.now += took_s * left / self.load.layers if step else took_s
        flight.done = self.now
        self.core.record_launch(batch, flight)
        self.running.append(batch)
        self.process(self.load.overlap and not flight.within)

    def process(self, left: int = 0) -> None:
        """Process the results of all but the newest ``left`` batches."""
        while len(self.running) > left:
            batch = self.running.pop(0)
            flight: Any = self.core.flight_of(batch)
            self.core.record_result(flight, self.now)
            longs = [part for req, part in zip(batch.reqs, flight.shape, strict=True) if req.cls == LONG]
            self.work_s += (MODEL.predict(longs) or 0.0) if longs else 0.0
            for req in batch.ends:
                self.waits_s[req.cls].append(self.now - req.came_s)
                req.there_s = self.now + self.load.transfer_s
                self.disagg_prefill_inflight_queue.append(req)
                heapq.heappush(self.coming, (self.now + 1e-3, req.client, req.cls))

    def build(self, paused: Any = None) -> Any:
        return self.builder.build(None, paused).batch_to_run

    def serve(self) -> None:
        """Run until SPAN_S; then record the waiting times of the requests that still wait."""
        while self.now < SPAN_S:
            self.take_in()
            batch = self.build()
            if batch is not None:
                self.run(batch)
            elif self.running:
                self.process()
            else:
                events = [
                    self.now + 0.01,
                    *(at for at, *_ in self.coming),
                    *(r.there_s for r in self.disagg_prefill_inflight_queue),
                ]
                self.now = min(at for at in events if at > self.now)
        self.process()
        begun = [] if self.chunked_req is None else [self.chunked_req]
        for req in [*self.waiting_queue, *self.core.chunked.parked, *begun]:
            self.waits_s[req.cls].append(self.now - req.came_s)


@pytest.mark.parametrize("seed", range(10, 22))
def test_long_work_gets_share_and_short_waits_stay_bounded(
    seed: int, adder: Callable[[int, int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_laps import builder

    load = Load.random(seed)
    server = Virtual(load, seed)
    monkeypatch.setattr(builder, "time", SimpleNamespace(perf_counter=lambda: server.now))
    server.serve()
    assert server.work_s >= 0.9 * load.long_share * SPAN_S, "its share of so short a time"
    assert max(server.waits_s[SHORT]) <= 2 * HOLD_S
    held = sum(r.seqlen for r in server.disagg_prefill_inflight_queue)
    begun = [r for r in [server.chunked_req, *server.core.chunked.parked] if r is not None]
    assert server.cache.free == load.pool - held - sum(r.extend_end for r in begun)
