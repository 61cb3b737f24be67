"""A short latency profile at server start: prefills of known sizes, measured like any other prefill."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.entrypoints.warmup import warmup
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_laps.support import resolved

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

NAME = "laps_profile"
"""Name of the warm-up, as in SGLang's --warmups."""
ROUNDS = 3
SINGLE = (8, 32, 64, 128, 256, 512, 1024)
BATCHES = ((4, 16), (8, 32), (4, 128), (16, 64))
"""Batches of the profile: (requests, tokens of each request)."""
CHUNKS = 3
"""Length of the longest profiled prompt, in chunks."""


@warmup(NAME)  # type: ignore[untyped-decorator,unused-ignore]
async def run(disaggregation_mode: str, tokenizer_manager: TokenizerManager) -> None:
    """Send the profile's prompts through the server's own tokenizer manager. No KV goes to a decode server."""
    rng = random.Random(0)
    vocab = tokenizer_manager.model_config.vocab_size
    chunk = resolved(tokenizer_manager.server_args).chunked_prefill_size or 0
    # The context, or all memory for KV, can be shorter than the profile's prompts.
    most = min(tokenizer_manager.model_config.context_len - 2, tokenizer_manager.max_req_input_len - 1)
    longest = min(CHUNKS * chunk if chunk > 0 else SINGLE[-1], most)

    async def prefill(tokens: int) -> None:
        request: Any = GenerateReqInput(
            input_ids=[rng.randrange(vocab) for _ in range(tokens)],
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        )
        if disaggregation_mode != "null":
            request.bootstrap_host, request.bootstrap_port = FAKE_BOOTSTRAP_HOST, 0
            request.bootstrap_room = rng.getrandbits(60)
        async for _ in tokenizer_manager.generate_request(request, None):
            pass

    try:
        for _ in range(ROUNDS):
            for tokens in SINGLE:
                if tokens <= longest:
                    await prefill(tokens)
            for requests, tokens in BATCHES:
                if tokens <= longest:
                    await asyncio.gather(*(prefill(tokens) for _ in range(requests)))
            await prefill(longest)
    except Exception as e:
        # SGLang would end the launch; the model also learns from requests.
        logger.warning("LAPS: the profile ended early: %s", e)
