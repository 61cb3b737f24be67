"""Prefix caches of servers that have no decode server.

Prompts of requests to FAKE_BOOTSTRAP_HOST stay in the cache, like others. A request with the custom parameter
``held_tokens`` has so many tokens of its prompt in the cache when it comes, though nothing computed them: what emulated
devices compute means nothing, and a session that began before the load is to find its history.
"""

from __future__ import annotations

import sys
from typing import Any


def load() -> None:
    """Stand around SGLang's requests and their handling; entry point of ``sglang.srt.plugins``."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    made = Req.__init__

    def make(req: Any, *args: Any, **kwargs: Any) -> None:
        made(req, *args, **kwargs)
        req.skip_radix_cache_insert = False

    Req.__init__ = make
    stock = Scheduler.handle_generate_request

    def handle(scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        held = (recv_req.sampling_params.custom_params or {}).get("held_tokens", 0)
        if held:
            hold(scheduler.tree_cache, recv_req.input_ids[:held])
        return stock(scheduler, recv_req, *args, **kwargs)

    Scheduler.handle_generate_request = handle


def hold(cache: Any, ids: Any) -> None:
    """Have these tokens in a prefix cache with pages of one token, in place of what was used least lately.

    Raises MemoryError if what is in use leaves no room for them.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.common import evict_from_tree_cache
    from sglang.srt.mem_cache.radix_cache import RadixKey

    evict_from_tree_cache(cache, len(ids))
    slots = cache.token_to_kv_pool_allocator.alloc(len(ids))
    if slots is None:
        raise MemoryError(f"no memory for a history of {len(ids)} tokens")
    # It frees the slots of what was there before.
    cache.insert(InsertParams(key=RadixKey(ids), value=slots))
