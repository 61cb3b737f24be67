"""Loads of cached prefixes from the host tier (HiCache): layer by layer, beside the pass that asked for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def wait_for_load(scheduler: Scheduler, batch: Any) -> None:
    """Let the device wait until the host tier has loaded all prefixes of `batch`, whose pass ends early. Later batches
    find them in the cache, and SGLang lets only the batch that loads them wait, layer by layer."""
    counter, load = scheduler.tp_worker.hicache_layer_transfer_counter, batch.hicache_consumer_index
    if load >= 0:
        counter.events[load].wait(counter.num_layers - 1)


def find_shared(scheduler: Scheduler, batch: Any, paused: Iterable[Any]) -> int:
    """Return the host load that `batch` must wait for; -1 = none. A prefix found on the device may still be loading
    for one of the `paused` batches, newest first; the loads of the newest batch end last. Streams waited for their
    loads when they started."""
    if not batch.forward_mode.is_extend():
        return -1
    table = scheduler.req_to_token_pool.req_to_token
    for below in paused:
        if below.hicache_consumer_index < 0:
            continue
        rows = zip(below.reqs, below.req_pool_indices, below.prefix_lens, strict=True)
        loads = [table[row, n - r.host_loaded_length : n] for r, row, n in rows if r.host_loaded_length]
        found = [table[row, :n] for row, n in zip(batch.req_pool_indices, batch.prefix_lens, strict=True)]
        if loads and bool(torch.isin(torch.cat(found), torch.cat(loads)).any()):
            return int(below.hicache_consumer_index)
    return -1
