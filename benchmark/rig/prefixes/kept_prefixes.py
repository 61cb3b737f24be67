"""SGLang plugin: prefix caches of servers that have no decode server.

Prompts of requests to FAKE_BOOTSTRAP_HOST stay in the cache, like other prompts. When a request with the custom
parameter ``held_tokens`` arrives, the server caches that many tokens of its prompt without computing them: results of
emulated devices mean nothing, and a session that started before the load must find its history.
"""

from __future__ import annotations

import sys
from typing import Any


def load() -> None:
    """Wrap SGLang's ``Req`` and its scheduler's request handler; entry point of the group ``sglang.srt.plugins``."""
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
    """Put these tokens into a prefix cache with pages of one token; evict the least recently used tokens for them.

    Raises MemoryError if the tokens in use leave too little memory.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.common import evict_from_tree_cache
    from sglang.srt.mem_cache.radix_cache import RadixKey

    evict_from_tree_cache(cache, len(ids))
    slots = cache.token_to_kv_pool_allocator.alloc(len(ids))
    if slots is None:
        raise MemoryError(f"no memory for a history of {len(ids)} tokens")
    # ``insert`` frees the duplicate slots of tokens that were cached before.
    cache.insert(InsertParams(key=RadixKey(ids), value=slots))
