"""Requests that SGLang accepts although they end its scheduler, and with it all requests."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import torch
from fastapi import HTTPException
from laps_core.refusals import LABELS, MEDIA, NO_OVERRIDES, OVERRIDES, misplaced
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_laps.support import resolved

SAMPLING = "sampling.sampling_params.SamplingParams.verify"
"""Method that checks the sampling parameters of every request that comes over HTTP."""
_MANAGER = "managers.tokenizer_manager.TokenizerManager"
RECORDS = (
    f"{_MANAGER}.start_expert_distribution_record",
    f"{_MANAGER}.stop_expert_distribution_record",
    f"{_MANAGER}.dump_expert_distribution_record",
)
"""Methods that ask the schedulers for a record of the chosen experts."""
SAMPLES = "managers.io_struct.GenerateReqInput._handle_parallel_sampling"
"""Method that reads how many samples of each prompt a request asks for, before a list is made of all of them."""
MOST_SAMPLES = 1 << 16
"""Most samples of one request. The HTTP process makes a request of each, and answers nobody meanwhile; without samples,
as many prompts make a body of some 300 KB."""
MOST_TOP_K = 2**31 - 1
MOST_BIAS = 1e30
"""Largest bias of a token: divided by the lowest temperature, 1e-6, it is still a number."""
UNTYPED = ("custom_params", "logit_bias", "watermark")
"""Sampling parameters that SGLang takes in other types, too, or checks itself."""
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
PADDING = 64
"""The embedding has rows for ids up to the next multiple of this number."""


def verify(params: Any, vocab_size: int) -> None:
    """Raise ValueError (answered 400) for values that no batch can hold, before ``SamplingParams.verify``. SGLang
    itself checks their types on /generate alone."""
    require_types(params)
    bias = {} if params.logit_bias is None else params.logit_bias
    if not isinstance(bias, dict) or not all(isinstance(v, (int, float)) and v <= MOST_BIAS for v in bias.values()):
        raise ValueError(f"logit_bias: not an object with a number up to {MOST_BIAS:g} for each token")
    if params.top_k > MOST_TOP_K:
        raise ValueError(f"top_k: {params.top_k} is not a number up to {MOST_TOP_K}")
    stops = params.stop_token_ids if params.min_new_tokens > 0 else None
    for token in stops or ():
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_token_ids: {token} is outside of the vocabulary of {vocab_size} tokens")


@cache
def _typed() -> Any:
    """Return a structure with the sampling parameters that SGLang declares a type for."""
    fields = msgspec.structs.fields(SamplingParams)
    return msgspec.defstruct("Typed", [(field.name, field.type) for field in fields if field.name not in UNTYPED])


def require_types(params: Any) -> None:
    """Give sampling parameters the types that SGLang declares: 5.0 becomes 5. Raise ValueError for values of other
    types."""
    try:
        typed = msgspec.convert(params, _typed(), strict=False, from_attributes=True)
    except msgspec.ValidationError as e:
        raise ValueError(f"sampling parameters: {e}") from None
    for name in typed.__struct_fields__:
        setattr(params, name, getattr(typed, name))


def require_recorder(manager: Any) -> None:
    """Raise HTTPException (answered 400) if this server has no recorder of experts."""
    if resolved(manager.server_args).expert_distribution_recorder_mode is None:
        raise HTTPException(400, "no experts are recorded without --expert-distribution-recorder-mode")


def require_few_samples(result: Any, obj: Any) -> Any:
    """Raise ValueError for more samples than MOST_SAMPLES, after ``_handle_parallel_sampling``."""
    n = obj.parallel_sample_num
    if isinstance(n, int) and n > 1 and n * obj.batch_size > MOST_SAMPLES:
        raise ValueError(f"n: {n} samples of {obj.batch_size} prompts are more than {MOST_SAMPLES} samples")
    return result


def require_room(obj: Any) -> None:
    """Raise ValueError for a bootstrap room that no transfer can have."""
    room = getattr(obj, "bootstrap_room", None)
    if room is not None and not (isinstance(room, int) and room >= 0):
        raise ValueError(f"bootstrap_room: {reprlib.repr(room)} is not a number from 0 on")


def require_known_labels(obj: Any, known: Sequence[str] | None) -> None:
    """Raise ValueError for a label that the metrics do not have. `known`: labels that requests may set."""
    for label in getattr(obj, LABELS, None) or ():
        if label not in (known or ()):
            name = reprlib.repr(label)
            raise ValueError(f"{LABELS}: {name} is not one of --tokenizer-metrics-allowed-custom-labels")


def require_positions(obj: Any, ids: Sequence[int] | None, args: Any) -> None:
    """Raise ValueError for positions to read that a pass would not find: it has all tokens of a prompt only without a
    prefix cache and without chunks. `args`: the server arguments as SGLang acts on them."""
    if not args.disable_radix_cache or args.chunked_prefill_size != -1:
        raise ValueError("token_indices_to_pool: only with --disable-radix-cache and --chunked-prefill-size -1")
    outside = [i for i in obj.token_indices_to_pool if not (isinstance(i, int) and 0 <= i < len(ids or ()))]
    if outside:
        raise ValueError(f"token_indices_to_pool: {reprlib.repr(outside[0])} is no position in the prompt")


def require_processor(obj: Any) -> None:
    """Raise ValueError for a logit processor that cannot be read, or of a beam search, which drops its parameters. Call
    it only on a server that takes processors: to read one is to run the client's code."""
    processor = getattr(obj, "custom_logit_processor", None)
    if not processor:
        return
    params = getattr(obj, "sampling_params", None)
    if isinstance(params, dict) and (params.get("beam_width") or 1) > 1:
        raise ValueError("custom_logit_processor: not with a beam search (beam_width)")
    try:
        CustomLogitProcessor.from_str(processor)
    except Exception as e:
        raise ValueError(f"custom_logit_processor: {type(e).__name__}: {reprlib.repr(str(e))}") from None


def require_rollback(obj: Any, args: Any) -> None:
    """Raise ValueError for a grammar of outlines on a server that drafts: it cannot take back the tokens of a draft.
    `args`: the server arguments."""
    params = getattr(obj, "sampling_params", None)
    found = next((name for name in GRAMMARS if isinstance(params, dict) and params.get(name)), None)
    if found and args.grammar_backend == "outlines" and args.speculative_algorithm:
        raise ValueError(f"{found}: not with --grammar-backend outlines and speculative decoding")


def has_media(obj: Any, model: Any) -> bool:
    """Return True if this model prefills something together with the text of a request, or in its place. A model for
    text alone ignores pictures, video and sound."""
    return any(getattr(obj, name, None) for name in (MEDIA if model.is_multimodal else MEDIA[:1]))


def require_harmless(obj: Any, model: Any) -> None:
    """Raise ValueError for values that this model cannot run. `model`: SGLang's model configuration."""
    if isinstance(obj, GenerateReqInput) and not model.is_generation:
        raise ValueError("this server makes embeddings (--is-embedding), and no text")
    if wrong := misplaced(lambda name: getattr(obj, name, None), batch=False):
        raise ValueError(wrong)
    vocab: int = model.vocab_size
    ids, rows = getattr(obj, "input_ids", None), getattr(obj, "input_embeds", None)
    if ids and not has_media(obj, model):
        outside = [i for i in (min(ids), max(ids)) if not 0 <= i < -(-vocab // PADDING) * PADDING]
        if outside:
            raise ValueError(f"input_ids: {outside[0]} is outside of the vocabulary of {vocab} tokens")
    if rows and model.dtype != torch.bfloat16:
        raise ValueError(f"input_embeds: SGLang takes them in bfloat16 alone, and this model is in {model.dtype}")
    if rows and any(len(row) != model.hidden_size for row in rows):
        raise ValueError(f"input_embeds: a row does not have {model.hidden_size} numbers")
    if getattr(obj, "return_logprob", False):
        most, first = obj.top_logprobs_num, obj.logprob_start_len
        if isinstance(most, int) and most > vocab:
            raise ValueError(f"top_logprobs_num: {most} is more than the vocabulary's {vocab} tokens")
        if isinstance(first, int) and first < -1:
            raise ValueError(f"logprob_start_len: {first} is below -1")
    overrides = getattr(obj, OVERRIDES, None)
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError(NO_OVERRIDES)
