"""Bounds on waiting that LAPS states for both classes (docs/LAPS.md, "What each class may count on"), compared with the
waits of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laps_core.policy.fairness import SAVED, stretch
from laps_plan.traffic.job import LONG, SHORT, THRESHOLD

from benchmark.load.client import Answer


@dataclass(frozen=True)
class Terms:
    """Terms of the bounds. Times in seconds."""

    lone_s: Callable[[int], float]
    gap_s: float
    """G, reported by the server."""
    patience: float
    """Most gaps that a short request waits."""
    guard: float
    chunk: int
    """New tokens of a long batch."""
    slice_s: float
    longest: int
    """Longest prompt (tokens)."""

    @property
    def short_batch(self) -> int:
        """Return the new tokens of a batch that preempts."""
        return max(THRESHOLD, self.chunk // 2)

    @property
    def short_batch_s(self) -> float:
        """Return S, the time of a batch that preempts."""
        return self.lone_s(self.short_batch)

    @property
    def long_batch_s(self) -> float:
        """Return B, the time of the longest prompt's last chunk."""
        return max(self.lone_s(self.longest) - self.lone_s(self.longest - self.chunk), self.lone_s(self.chunk))

    def long_s(self, work_s: float) -> float:
        """Return the longest TTFT of a long prompt with ``work_s`` of long work before and in it."""
        gap, short = self.gap_s, self.short_batch_s
        # Up to half of the steps may belong to short requests, if they share them.
        return ((2 * work_s + 2 * self.long_batch_s) / self.guard + gap) * stretch(gap, short) + (SAVED - 1) * short

    def short_s(self, tokens: int, batch_s: float) -> float:
        """Return the longest TTFT of a short request with ``tokens`` short tokens before and in it; its batches take
        ``batch_s``."""
        # A batch is full when the next request does not fit.
        batches = 1 + tokens // (self.short_batch - THRESHOLD + 1)
        turn_s = self.patience * self.gap_s + batch_s
        # The last batch may be a step shared with long prompts, which others preempt.
        shared_s = self.patience * self.gap_s * stretch(self.gap_s, self.short_batch_s)
        return self.slice_s + batches * turn_s + max(turn_s, shared_s + (SAVED - 1) * self.short_batch_s)


def _ahead(answers: Sequence[Answer], size: Callable[[Answer], float]) -> list[float]:
    """Return for each request its size plus the sizes of those sent before it and still unanswered."""
    out = []
    for i, a in enumerate(answers):
        waiting = (b for b in answers[:i] if b.ttft_s is None or b.sent_s + b.ttft_s > a.sent_s)
        out.append(size(a) + sum(size(b) for b in waiting))
    return out


def worst(answers: Sequence[Answer], kind: str, terms: Terms) -> float:
    """Return the largest TTFT over its bound in a round; infinite if a request failed, NaN without requests."""
    mine = sorted((a for a in answers if a.job.kind == kind), key=lambda a: a.sent_s)
    if kind == LONG:
        bounds = [terms.long_s(work) for work in _ahead(mine, lambda a: terms.lone_s(a.job.new))]
    else:
        assert kind == SHORT
        bounds = [terms.short_s(int(t), terms.short_batch_s) for t in _ahead(mine, lambda a: a.job.new)]
    ratios = [math.inf if a.ttft_s is None else a.ttft_s / b for a, b in zip(mine, bounds, strict=True)]
    return max(ratios, default=math.nan)
