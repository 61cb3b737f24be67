"""Messages from SGLang's HTTP server that arrive while a batch is paused, and which of them are dispatched then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    AttachHiCacheStorageReqInput,
    BatchTokenizedGenerateReqInput,
    CheckWeightsReqInput,
    ClearHiCacheReqInput,
    CloseSessionReqInput,
    ConfigureLoggingReq,
    DetachHiCacheStorageReqInput,
    ExpertDistributionReq,
    FlushCacheReqInput,
    FreezeGCReq,
    GetInternalStateReq,
    GetWeightsByNameReqInput,
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    OpenSessionReqInput,
    PauseGenerationReqInput,
    ProfileReq,
    SetInternalStateReq,
    SlowDownReqInput,
    TokenizedGenerateReqInput,
    UnloadLoRAAdapterReqInput,
    UpdateWeightVersionReqInput,
)

AT_ONCE = (
    *(TokenizedGenerateReqInput, BatchTokenizedGenerateReqInput, AbortReq, GetInternalStateReq, SetInternalStateReq),
    *(OpenSessionReqInput, CloseSessionReqInput, ProfileReq, ConfigureLoggingReq, FreezeGCReq, SlowDownReqInput),
    UpdateWeightVersionReqInput,
    # A new adapter is kept on the host until a batch uses it.
    *(LoadLoRAAdapterReqInput, LoadLoRAAdapterFromTensorsReqInput),
    # SGLang refuses these while a batch runs, or tries them again when the server is idle.
    *(FlushCacheReqInput, AttachHiCacheStorageReqInput, DetachHiCacheStorageReqInput),
)
"""Messages that can be dispatched while a batch is paused: they change neither weights nor a running batch."""
ALONE = (
    *(UnloadLoRAAdapterReqInput, ClearHiCacheReqInput, ExpertDistributionReq),
    *(GetWeightsByNameReqInput, CheckWeightsReqInput),
)
"""Messages that wait for the end of the batch while later ones do not: a client sends what relies on such a message
after its reply. Any other message, and all messages after it, wait for the end of the batch."""


def take_ready(deferred: list[Any], adapters: Callable[[], Collection[str | None]]) -> list[Any]:
    """Remove the messages that can be dispatched in this pause from `deferred` and return them. `adapters`: returns the
    ids of the LoRA adapters of paused batches, which cannot be unloaded."""
    ready, left = list[Any](), list[Any]()
    for i, message in enumerate(deferred):
        unused = isinstance(message, UnloadLoRAAdapterReqInput) and message.lora_id not in adapters()
        if unused or isinstance(message, AT_ONCE):
            ready.append(message)
        elif isinstance(message, ALONE):
            left.append(message)
        else:
            left += deferred[i:]
            break
    deferred[:] = left
    return ready


def holds(deferred: list[Any]) -> bool:
    """Return True if one of these messages, which were not ready, holds back all later messages."""
    return any(not isinstance(message, ALONE) for message in deferred)


def stop(deferred: list[Any]) -> bool:
    """Return True after /pause_generation: it waits for the end of the pass, and nothing else runs meanwhile."""
    return any(isinstance(message, PauseGenerationReqInput) for message in deferred)
