"""Grid of batches whose step times are looked up, and composition of the time of a batch of unlike prompts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from laps_core.latency.step import StepSample

Batch = Sequence[tuple[int, int]]
"""(L new tokens, H history tokens) of each request."""
Kernels = Callable[[int, int, int], dict[str, float]]
"""Seconds of each kind of kernel in a step of (L new tokens, H history tokens, number of equal requests)."""

_LONE = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192)
_ALIKE = {16: (2, 4, 8, 16, 32), 64: (2, 4, 8, 16, 32), 256: (2, 4, 8, 16, 32), 512: (2, 4, 8, 16), 1024: (2, 4, 8),
          2048: (2, 4), 4096: (2,)}  # fmt: skip
"""New tokens of a request -> numbers of equal requests in a batch."""
_HISTORY = (1024, 4096, 8192, 32768)
_AFTER = ((16, 1), (64, 1), (64, 8), (64, 32), (256, 1), (256, 4), (1024, 1), (4096, 1), (8192, 1))
"""(New tokens, equal requests), combined with each history of _HISTORY."""
_MIXED: tuple[Batch, ...] = (
    ((2048, 0), *[(64, 0)] * 8),
    ((512, 0), (256, 0), *[(64, 0)] * 4),
    ((1024, 0), (512, 0), (256, 0), (128, 0)),
    ((4096, 4096), *[(128, 0)] * 8),
    ((4096, 8192), (2048, 0), (1024, 1024)),
    ((1024, 32768), *[(64, 1024)] * 8),
    (*[(128, 4096)] * 8, *[(32, 0)] * 16),
    ((6144, 0), (1024, 8192), *[(256, 0)] * 4),
)
LONGEST = 8192
"""Maximum new tokens of a step."""


def batches() -> Iterator[Batch]:
    """Yield lone prompts, batches of equal prompts, prompts with histories, and batches of unlike prompts."""
    for new in _LONE:
        yield [(new, 0)]
    for new, counts in _ALIKE.items():
        yield from ([(new, 0)] * n for n in counts)
    for old, (new, n) in itertools.product(_HISTORY, _AFTER):
        yield [(new, old)] * n
    yield from _MIXED


def samples(kernels: Kernels) -> list[StepSample]:
    """Return every batch of the grid with its time."""
    return [StepSample.of(batch, seconds(batch, kernels)) for batch in batches()]


def seconds(batch: Batch, kernels: Kernels) -> float:
    """Return the time of a step (seconds).

    Data exist only for batches of equal prompts. The time of a mixed batch is composed. Attention takes the sum over
    its kinds of prompts, less the start of the kernel for all but one of them. Logits take their time for the same
    number of requests, and all other kernels take their time for the same number of tokens.
    """
    kinds = Counter(batch)
    if len(kinds) == 1:
        ((new, old), n) = next(iter(kinds.items()))
        return sum(kernels(new, old, n).values())
    tokens = sum(new for new, _ in batch)
    body = sum(s for name, s in kernels(tokens, 0, 1).items() if not _attends(name) and "logits" not in name)
    logits = sum(s for name, s in kernels(1, 0, len(batch)).items() if "logits" in name)
    least = _attention(kernels(1, 0, 1))
    attention = sum(_attention(kernels(new, old, n)) for (new, old), n in kinds.items())
    return body + logits + attention - (len(kinds) - 1) * least


def _attends(name: str) -> bool:
    return name.endswith("attention")


def _attention(kernels: dict[str, float]) -> float:
    return sum(s for name, s in kernels.items() if _attends(name))
