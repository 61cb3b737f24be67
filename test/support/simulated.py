"""Profiles, lengths and conversations that the simulator's tests share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from laps_core.latency.step import Coefficients
from laps_plan.profile import Profile
from laps_plan.sim.metrics import Floats, Outcome
from laps_plan.sim.variants import LAPS, POLICIES
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes, log_uniform, mix, uniform
from laps_plan.traffic.streams import Closed

PROFILE = Profile(name="test", source="made up", coefficients=Coefficients(2e-9, 2e-5, 1e-9, 1e-5, 5e-3), poll_s=1e-9)


HOST_PROFILE = Profile(
    name="host", source="made up", coefficients=Coefficients(2e-9, 2e-5, 1e-9, 1e-5, 5e-3), front_s=1e-3, poll_s=1e-4,
    front_token_s=1e-6, step_host_s=5e-4, reply_s=3e-4, spread=(0.9, 1.0, 1.3),
)  # fmt: skip


MIX = mix(uniform(8, 256), log_uniform(1000, 20000), 0.1)


CHUNK = 2048


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*POLICIES, LAPS)},
    "paper": (LAPS, {"preset": "paper"}), "dual": (LAPS, {"wait_window_ms": 0.0}),
}  # fmt: skip
"""Name of a way to serve -> policy, and knobs of LAPS."""


def ttft(outcome: Outcome, *, short: bool, warm: float = 0.0) -> Floats:
    """Return the TTFTs of one class (seconds). ``warm``: first share of the time, which is not counted (0..1)."""
    at, new, took = (np.array(getattr(outcome.record, name)) for name in ("at", "new", "ttft"))
    return took[((new <= 256) == short) & (at >= at.min() + warm * (at.max() - at.min()))]


def p90(outcome: Outcome, *, short: bool, warm: float = 0.0) -> float:
    """Return the P90 TTFT of one class (seconds); see ``ttft``."""
    return float(np.percentile(ttft(outcome, short=short, warm=warm), 90))


TURN, REPLY = uniform(10, 200), uniform(50, 400)


@dataclass
class Sessions(Closed):
    """Conversations: ``clients`` at a time, each replaced by a new one at its end; ``sizes``: lengths of first turns.

    A turn adds ``turn`` new tokens and later the ``reply`` of the model to the history; the next turn comes ``think_s``
    (exponential, mean) after the answer. The history is cached where the conversation was served before.
    """

    turn: Sizes = TURN
    turns: float = 5.0
    """Mean turns of a conversation (geometric)."""
    reply: Sizes = REPLY
    think_s: float = 5.0
    _history: dict[int, int] = field(init=False, default_factory=dict)
    _session: dict[int, int] = field(init=False, default_factory=dict)
    _count: int = field(init=False, default=0)

    def _next(self, now: float, client: int) -> Job:
        rng = self._rngs[client]
        self._sent += 1
        at = now + rng.expovariate(1.0 / self.think_s)
        if client not in self._session or rng.random() < 1.0 / self.turns:
            self._count += 1
            self._session[client] = self._count
            new, history = self.sizes(rng), 0
        else:
            history = self._history[client] + self.reply(rng)
            new = self.turn(rng)
        self._history[client] = history + new
        stream, number = self._session[client], self._sent
        return Job(at, new, history, stream, continues_stream=True, client=client, number=number)
