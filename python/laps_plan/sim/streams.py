"""Requests that a server decodes, and the times of their tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from laps_plan.sim.metrics import Floats
from laps_plan.sim.request import Batch, Request


class Streams:
    """Requests being decoded. Each step makes one token of each, so any number of them costs the same to simulate."""

    def __init__(self) -> None:
        self.count = self.context = 0
        """Number of streams, and total tokens of their contexts."""
        self.steps = 0
        """Number of steps so far, including steps in flight."""
        self._last: dict[int, list[Request]] = {}
        """By step: requests whose last token the step makes."""

    def join(self, requests: Iterable[Request]) -> None:
        """Add requests that have their first token; requests with more tokens are decoded from the next step on."""
        for r in requests:
            if r.output > 1:
                r.first_step = self.steps
                self._last.setdefault(self.steps + r.output - 2, []).append(r)
                self.count += 1
                self.context += r.prompt + 1

    def step(self, batch: Batch) -> Batch:
        """Return the batch with one row of each stream added."""
        batch.streams, batch.context = self.count, self.context
        batch.last = self._last.pop(self.steps, [])
        self.steps += 1
        self.context += self.count - sum(r.prompt + r.output for r in batch.last)
        self.count -= len(batch.last)
        return batch


class TokenLog:
    """Times at which the steps of one server reached its clients, and the streams of each step."""

    def __init__(self) -> None:
        self.at_s, self.streams = array("d"), array("l")
        self.requests: list[Request] = []
        """Finished requests."""
        self.most_context = 0
        """Maximum tokens of context of a step."""

    def step(self, at_s: float, streams: int, context: int = 0) -> None:
        """Record that the tokens of the next step reach the clients."""
        self.at_s.append(at_s)
        self.streams.append(streams)
        self.most_context = max(self.most_context, context)


@dataclass
class Tokens:
    """Times between tokens of all streams, in seconds."""

    gaps: Floats
    """Times between two tokens of a stream; equal times of one step share an entry."""
    counts: Floats
    """Number of streams for each of ``gaps``."""
    logs: Sequence[TokenLog]

    @classmethod
    def of(cls, logs: Sequence[TokenLog], since_s: float = 0.0, until_s: float = math.inf) -> Tokens:
        """Return the times between tokens on all servers, for tokens that came from ``since_s`` until ``until_s``."""
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
        """Return the time between tokens that this share of all times does not exceed; NaN if there are no times."""
        kept = self.counts > 0.0
        if not kept.any():
            return float("nan")
        order = np.argsort(self.gaps[kept])
        gaps, counts = self.gaps[kept][order], np.cumsum(self.counts[kept][order])
        return float(gaps[min(int(np.searchsorted(counts, share * counts[-1])), len(gaps) - 1)])

    def late(self, most_s: float) -> dict[int, int]:
        """Return by request number: number of tokens that came more than ``most_s`` after the token before."""
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
