"""The requests that a server decodes, and when each of them had its tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laps_plan.sim.request import Batch, Request

Floats = NDArray[np.float64]


class Streams:
    """Every one of them has a token from every step, so a step costs the same to simulate however many there are."""

    def __init__(self) -> None:
        self.count = self.context = 0
        """Requests, and tokens of all their contexts."""
        self.steps = 0
        """Steps so far, those in flight included."""
        self._last: dict[int, list[Request]] = {}
        """By step: those whose last token it makes."""

    def join(self, requests: Iterable[Request]) -> None:
        """These have their first token; those of more are decoded from the next step on."""
        for r in requests:
            if r.output > 1:
                r.first_step = self.steps
                self._last.setdefault(self.steps + r.output - 2, []).append(r)
                self.count += 1
                self.context += r.prompt + 1

    def step(self, batch: Batch) -> Batch:
        """The same batch with a row of each of them."""
        batch.streams, batch.context = self.count, self.context
        batch.last = self._last.pop(self.steps, [])
        self.steps += 1
        self.context += self.count - sum(r.prompt + r.output for r in batch.last)
        self.count -= len(batch.last)
        return batch


class TokenLog:
    """When the steps of one server reached its clients, and whom they served."""

    def __init__(self) -> None:
        self.at_s, self.streams = array("d"), array("l")
        self.requests: list[Request] = []
        """Finished requests."""
        self.most_context = 0
        """Tokens of context of a step, at most."""

    def step(self, at_s: float, streams: int, context: int = 0) -> None:
        """The next step's tokens are there."""
        self.at_s.append(at_s)
        self.streams.append(streams)
        self.most_context = max(self.most_context, context)


@dataclass
class Tokens:
    """Times between tokens, and whose they are. Times in seconds."""

    gaps: Floats
    """Times between two tokens of a stream; those of one step are alike."""
    counts: Floats
    """How many streams each of ``gaps`` was for."""
    logs: Sequence[TokenLog]

    @classmethod
    def of(cls, logs: Sequence[TokenLog], since_s: float = 0.0, until_s: float = math.inf) -> Tokens:
        """All of these servers, of the tokens that came from then until then."""
        gaps, counts = [], []
        for log in logs:
            at, streams = np.array(log.at_s), np.array(log.streams, dtype=float)
            if not len(at):
                continue
            joined = np.zeros(len(at))
            begun = [r for r in log.requests if r.first_step >= 0]
            first = np.array([r.first_step for r in begun], dtype=int)
            np.add.at(joined, first, 1.0)
            later = (at >= since_s) & (at < until_s)
            each = np.diff(at, prepend=at[0])
            gaps.append(each[later])
            counts.append(np.maximum(0.0, streams - joined)[later])
            own = at[first] - np.array([r.first_s for r in begun])
            gaps.append(own[later[first]])
            counts.append(np.ones(int(later[first].sum())))
        empty = np.zeros(0)
        return cls(np.concatenate([*gaps, empty]), np.concatenate([*counts, empty]), logs)

    def quantile(self, share: float) -> float:
        """Time between tokens that this share of all is no longer than; NaN if there are none."""
        kept = self.counts > 0.0
        if not kept.any():
            return float("nan")
        order = np.argsort(self.gaps[kept])
        gaps, counts = self.gaps[kept][order], np.cumsum(self.counts[kept][order])
        return float(gaps[min(int(np.searchsorted(counts, share * counts[-1])), len(gaps) - 1)])

    def late(self, most_s: float) -> dict[int, int]:
        """By request number: how many of its tokens came later than this after the one before."""
        found: dict[int, int] = {}
        for log in self.logs:
            at = np.array(log.at_s)
            late = np.concatenate([[0], np.cumsum(np.diff(at, prepend=at[:1]) > most_s)])
            for r in log.requests:
                if r.first_step >= 0:
                    end = r.first_step + r.output - 1
                    own = at[r.first_step] - r.first_s > most_s
                    found[r.number] = int(late[end] - late[r.first_step + 1]) + int(own)
                else:
                    found[r.number] = 0
        return found
