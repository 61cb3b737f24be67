"""Prefill steps: their shapes, and the terms of their time in the latency model (LAPS, s2.1).

A request of L new tokens and H history tokens costs alpha L (L + 2H) + (beta + gamma_w) L + gamma_r H. A step costs the
sum over its requests, plus ``per_request`` for each and ``fixed`` once. beta and gamma_w multiply the same L, so only
their sum (``linear``) can be fitted to step times. The paper's L_m needs each of them; the boundary here is a knee
instead. If a device computes while it reads the weights, the larger of the two times counts, not the sum (``flat``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta

from laps_core.latency.boundary import knee

Cost = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]
Count = Annotated[int, Meta(ge=0)]
Requests = Iterable[tuple[int, int]]
"""(L new tokens, H history tokens) of each request of a step."""


class StepShape(NamedTuple):
    """Sums over a step's requests that determine its time."""

    attention: int
    """Sum of L (L + 2H) (tokens^2)."""
    tokens: int
    """Sum of L."""
    history: int
    """Sum of H."""
    requests: int

    @classmethod
    def of(cls, requests: Requests) -> StepShape:
        attention = tokens = history = count = 0
        for new, old in requests:
            attention += new * (new + 2 * old)
            tokens += new
            history += old
            count += 1
        return cls(attention, tokens, history, count)


class StepSample(NamedTuple):
    """One measured prefill step."""

    shape: StepShape
    seconds: float
    number: int = 0
    """Number of the step, counted by the model since its start; 0: from a file."""

    @classmethod
    def of(cls, requests: Requests, seconds: float) -> StepSample:
        return cls(StepShape.of(requests), seconds)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Costs of a step's parts. None is negative."""

    alpha: Cost
    """s/token^2."""
    linear: Cost
    """beta + gamma_w, s/token."""
    gamma_r: Cost
    """s/history token."""
    per_request: Cost
    """s/request."""
    fixed: Cost
    """c, s/step."""
    flat: Count = 0
    """Tokens whose arithmetic hides behind the reading of the weights: a step of fewer tokens takes as long as one of
    this many tokens. 0 = the two times add up (LAPS, s2.1)."""

    def seconds(self, shape: StepShape) -> float:
        attention, tokens, history, requests = shape
        if tokens < self.flat:
            tokens = self.flat
        tokens_s = self.alpha * attention + self.linear * tokens + self.gamma_r * history
        return tokens_s + self.per_request * requests + self.fixed

    def work_s(self, new: int, history: int) -> float:
        """Return the time that a request of these tokens adds to a step (seconds)."""
        return self.alpha * new * (new + 2 * history) + self.linear * new + self.gamma_r * history + self.per_request

    @property
    def step_s(self) -> float:
        """Return the time of the smallest step (seconds): memory time (LAPS, s2.1), launches and the like."""
        return self.fixed + self.linear * self.flat

    @property
    def overhead_s(self) -> float:
        """Return F, the cost of one more step: the time of the smallest step with one request (seconds)."""
        return self.step_s + self.per_request

    def hidden_s(self, tokens: int) -> float:
        """Return how much time of these tokens is hidden in a step without other tokens (seconds); see ``flat``."""
        return self.linear * min(tokens, self.flat)

    def boundary(self) -> float:
        """Return the length of a prompt without history whose tokens take as long as ``overhead_s`` (tokens)."""
        return knee(self.alpha, self.linear, self.overhead_s)
