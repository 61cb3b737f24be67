"""SGLang's KV pool without the Triton kernel that moves KV after a draft was verified."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class HostPool(MHATokenToKVPool):
    """A pool that does not try its kernel at once, as SGLang's pool does with speculative decoding."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
