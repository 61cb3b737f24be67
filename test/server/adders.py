"""SGLang's own PrefillAdder without a server: the pool, prefix cache and request fields that it needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from laps_core.policy.types import Plan
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy
from sglang_laps.classes import Tag


class Cache:
    """Empty prefix cache over a pool with `free` KV tokens."""

    disable = False
    buffer_pipeline = None

    def __init__(self, page_size: int = 1, free: int = 1 << 30) -> None:
        self.page_size, self.free = page_size, free

    def supports_mamba(self) -> bool:
        return False

    supports_prefix_sharing = supports_mamba

    def evictable_size(self) -> int:
        return 0

    def available_size(self) -> int:
        return self.free

    def lock(self, node: Any) -> None:
        return None

    def request_slot_reserve(self, **_: Any) -> int:
        return 0

    def create_prefill_budget(self, tree_cache: Any, **_: Any) -> Any:
        from sglang.srt.mem_cache.prefill_budget import PrefillBudget

        return PrefillBudget(self, tree_cache)


class Prompt:
    """Request with the fields that the stock adder reads."""

    def __init__(self, tokens: int) -> None:
        self.full_untruncated_fill_ids = range(tokens)
        self.sampling_params = SimpleNamespace(max_new_tokens=1, ignore_eos=False)
        self.output_ids: list[int] = []
        self.prefix_len = self.extend_end = 0
        self.kv = SimpleNamespace(req_pool_idx=None, holds_mamba=False)
        self.host_hit_length = self.swa_host_hit_length = self.auxiliary_swa_host_hit_length = 0
        self.retracted_stain = False
        self.last_node = self.cache_request_handle = self.input_embeds = None

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    def needs_host_load_back(self) -> bool:
        return False


def make_request(tokens: int) -> Any:
    """Return a waiting request with this number of new tokens."""
    req: Any = Prompt(tokens)
    req.laps_tag = Tag(0.0, 0.0, None, new_tokens=tokens)
    return req


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Any]:
    """Return adder(page_size, chunk_tokens), which makes a stock adder that needs no running server."""
    from sglang.srt.managers import schedule_policy

    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    monkeypatch.setattr(schedule_policy, "get_exec", lambda: SimpleNamespace(features=features))
    monkeypatch.setattr(schedule_policy, "get_schedule", lambda: SimpleNamespace(schedule_policy="fcfs"))
    monkeypatch.setattr(schedule_policy.PrefillAdder, "_lock_node", lambda *_, **__: nullcontext())
    monkeypatch.setattr(schedule_policy.PrefillAdder, "_account_prefill_cache_admission", lambda *_: None)

    def make(page: int, chunk: int) -> Any:
        cache = Cache(page)
        return schedule_policy.PrefillAdder(page, cache, cache, None, 1.0, 1 << 20, chunk)

    return make


def fill_batch(make: Any, cache: Cache, queue: list[Any], chunk: int, chunked_req: Any = None) -> tuple[Any, Any]:
    """Build a batch like SGLang's builder. Return (the adder with its batch, the prompt that continues after it).

    `make`: class of the adder. `queue`: waiting requests. `chunked_req`: a prompt between two chunks."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    adder = make(cache.page_size, cache, cache, None, 1.0, 1 << 20, chunk)
    chunked = None
    if chunked_req is not None:
        chunked_req.prefix_len = chunked_req.extend_end
        chunked = adder.add_chunked_req(chunked_req)
    for req in queue:
        result = adder.add_one_req(req, has_chunked_req=chunked is not None, truncation_align_size=None)
        if result is not AddReqResult.CONTINUE:
            break
    cache.free -= sum(r.extend_len for r in adder.can_run_list)
    return adder, adder.new_chunked_req or chunked


class Grammars:
    """SGLang's requests that wait for their grammars, and those whose grammars are `ready`."""

    SGLANG_GRAMMAR_POLL_INTERVAL = 0.005

    def __init__(self) -> None:
        self.grammar_queue: list[Any] = []
        self.ready: list[Any] = []
        self.looked_s: list[float] = []

    def has_waiting_grammars(self) -> bool:
        return bool(self.grammar_queue or self.ready)

    def get_ready_grammar_requests(self) -> list[Any]:
        self.looked_s.append(self.SGLANG_GRAMMAR_POLL_INTERVAL)
        for req in self.grammar_queue:
            req.grammar_wait_ct += 1
        ready, self.ready = self.ready, []
        return ready


class FcfsPolicy:
    """Fields of SGLang's policy that LAPS touches."""

    policy = CacheAgnosticPolicy.FCFS
    _touch_waiting_prefixes: Any = None

    def __init__(self, *, by_priority: bool = False) -> None:
        self.enable_priority_scheduling = by_priority


@dataclass(frozen=True)
class LoadInquirer:
    """SGLang's counter of waiting tokens."""

    get_waiting_queue: Any = None
    get_chunked_req: Any = None


class SingleRank:
    """Ranks of a scheduler that has one rank."""

    leader, stages, min_divisible_tokens = True, 1, 0

    def agree(self, plan: Plan) -> Plan:
        """Return the plan unchanged."""
        return plan


def make_builder(scheduler: Any, core: Any, stock: Any) -> Any:
    """Return the builder of a one-rank scheduler whose batches cannot run in slices. `stock`: SGLang's function that
    builds the next batch."""
    from sglang_laps.builder import Builder

    ranks: Any = SingleRank()
    return Builder(scheduler, core, ranks, stock)
