"""Where long prompts are cut: SGLang rounds a cut down to its pages and its alignment, and what it rounds to nothing
would never start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_laps.pacing import LongWork, Pacer
from sglang_laps.policy.config import LapsConfig

from .conftest import LAPS, Reference
from .test_prefill_server import ids, send_all

SERVER_CHUNK = 10_000 // 64 * 64


class Cache:
    """A prefix cache that holds nothing, over a pool that is never full."""

    disable = False
    page_size = 64

    def supports_mamba(self) -> bool:
        return False

    supports_prefix_sharing = supports_mamba

    def evictable_size(self) -> int:
        return 0

    def available_size(self) -> int:
        return 1 << 30

    def lock(self, node: Any) -> None:
        return None

    def request_slot_reserve(self, **_: Any) -> int:
        return 0

    def create_prefill_budget(self, tree_cache: Any, **_: Any) -> Any:
        from sglang.srt.mem_cache.prefill_budget import PrefillBudget

        return PrefillBudget(self, tree_cache)


class Prompt:
    """A request, as far as the stock adder looks at it."""

    def __init__(self, tokens: int) -> None:
        self.full_untruncated_fill_ids = range(tokens)
        self.sampling_params = SimpleNamespace(max_new_tokens=1, ignore_eos=False)
        self.output_ids: list[int] = []
        self.prefix_len = self.extend_end = 0
        self.kv = SimpleNamespace(req_pool_idx=None, holds_mamba=False)
        self.host_hit_length = self.swa_host_hit_length = self.auxiliary_swa_host_hit_length = 0
        self.retracted_stain = False
        self.last_node = self.cache_request_handle = None

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    def needs_host_load_back(self) -> bool:
        return False


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Any]:
    from sglang.srt.managers import schedule_policy

    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    monkeypatch.setattr(schedule_policy, "get_exec", lambda: SimpleNamespace(features=features))
    monkeypatch.setattr(schedule_policy, "get_schedule", lambda: SimpleNamespace(schedule_policy="fcfs"))
    monkeypatch.setattr(schedule_policy.PrefillAdder, "_lock_node", lambda *_, **__: nullcontext())
    monkeypatch.setattr(schedule_policy.PrefillAdder, "_account_prefill_cache_admission", lambda *_: None)

    def make(page: int, chunk: int) -> Any:
        cache = Cache()
        cache.page_size = page
        return schedule_policy.PrefillAdder(page, cache, cache, None, 1.0, 1 << 20, chunk)

    return make


@pytest.mark.parametrize(("page", "align"), [(1, None), (64, None), (1, 4096), (64, 4096), (48, 4096), (64, 96)])
@pytest.mark.parametrize("wanted", [None, 100, 5000, 9999])
@pytest.mark.parametrize("slack_s", [None, 1e-4, 0.02, 0.3])
def test_every_long_prompt_runs_to_its_end_in_whole_units(
    adder: Callable[[int, int], Any], page: int, align: int | None, wanted: int | None, slack_s: float | None
) -> None:
    unit = page if align is None else {(1, 4096): 4096, (64, 4096): 4096, (48, 4096): 12288, (64, 96): 192}[page, align]
    wanted = None if wanted is None else max(wanted, unit)
    server_chunk = max(SERVER_CHUNK, unit)
    me = Pacer(
        LapsConfig(long_chunk_tokens=wanted, wait_window_ms=0.0),
        threshold=256,
        chunk_tokens=server_chunk,
        page_size=page,
        align=align,
    )
    me.model.predict = lambda requests: sum(1e-4 * new for new, _ in requests)  # type: ignore[method-assign]
    shorts = [] if slack_s is None else [(1, 0, 0.0, slack_s + 1e-4, "short")]
    prompt = Prompt(30_000)
    cuts = []
    while prompt.extend_end < 30_000:
        done = prompt.extend_end
        plan = me.plan(0.0, shorts, [], short=bool(shorts), long=LongWork(30_000 - done, done, 0.0, 30_000))
        builder = adder(page, min(plan.chunk_tokens or server_chunk, server_chunk))
        prompt.prefix_len = done
        if done == 0:
            builder.add_one_req(prompt, has_chunked_req=False, truncation_align_size=align)
        else:
            builder.add_chunked_req(prompt)
        cuts.append(prompt.extend_end - done)
        assert cuts[-1] > 0, f"nothing of the prompt fits a chunk of {plan.chunk_tokens}"
    assert all(cut % unit == 0 for cut in cuts[:-1]), cuts
    assert max(cuts) <= max(wanted or server_chunk, unit)


@pytest.mark.timeout(300)
def test_a_server_with_pages_cuts_long_prompts_into_whole_pages(
    start_prefill: Callable[..., Any], reference: Reference
) -> None:
    pages = ("--page-size", "64", "--laps-config", '{"long_chunk_tokens": 100}')
    with start_prefill(*LAPS, *pages) as server:
        prompts = [ids(1, 300), ids(2, 700)]
        for prompt in prompts:
            before = server.totals()["long"]["batches"]
            assert asyncio.run(send_all(server, [prompt])) == reference.greedy(prompt, 1)
            assert server.totals()["long"]["batches"] - before == -(-len(prompt) // 64)
        assert len(asyncio.run(send_all(server, prompts + [ids(3, 60)] * 8, spread_s=0.2))) == 10
        server.all_tokens_are_free()
        server.must_be_clean()
