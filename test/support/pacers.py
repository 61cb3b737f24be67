"""A pacer, waiting requests and batches, for tests of the whole policy."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.latency.step import Coefficients
from laps_core.length import SHORT
from laps_core.policy.fairness import SAVED, Gap
from laps_core.policy.pacer import Pacer
from laps_core.policy.predict import BATCH_TOKENS
from laps_core.policy.types import Paused, Plan, Running, Waiting
from laps_plan.profile import Profile

FIXED_S, TOKEN_S = 5e-3, 25e-6
COSTS = st.one_of(st.just(0.0), st.floats(1e-12, 1e-2))
"""Coefficients of a latency model (seconds); 0 is one of them."""
MODELS = st.builds(Coefficients, COSTS, COSTS, COSTS, COSTS, COSTS, st.sampled_from([0, 300]))
"""Latency models as any kind of steps can produce them; every term can be 0."""


GAP = FIXED_S / 0.25


LAYERS, CHUNK = 28, 8192


PROFILE = Profile(name="test", source="made up", coefficients=Coefficients(0.0, TOKEN_S, 0.0, 0.0, FIXED_S))


def make_pacer(
    *,
    known: bool = True,
    layers: int = LAYERS,
    chunk: int | None = CHUNK,
    batch_tokens: int = BATCH_TOKENS,
    unit: int = 1,
    **knobs: Any,
) -> Pacer:
    """Return a pacer. If `known`, its latency model says that a step takes FIXED_S + TOKEN_S * tokens (seconds)."""
    config = LapsConfig(**{"wait_window_ms": 0.0, **knobs})
    model = PROFILE.model() if known else None
    return Pacer(config, chunk_tokens=chunk, batch_tokens=batch_tokens, unit=unit, layers=layers, model=model)


def short_prompt(key: object, tokens: int = 50, arrival: float = 0.0, deadline: float | None = None) -> Waiting:
    """Return a waiting short prompt. `key` only names the prompt for the reader."""
    return Waiting(tokens, 0, arrival, deadline)


def long_prompt(
    tokens: int, since: float = 0.0, *, done: int = 0, deadline: float | None = None, priority: int = 0
) -> Waiting:
    return Waiting(tokens - done, done, since, deadline, tokens, done > 0, priority)


def paused_prompt(left_s: float = 0.2, depth: int = 1, weight: float = 4.0) -> Paused:
    """Return a paused long prompt; weight 4 means that the prompt takes 0.25 s alone."""
    return Paused(left_s, depth, weight=weight)


def use_up_preemptions(gap: Gap, at: float) -> None:
    """Use up all saved preemptions: from `at` on each short batch waits for its gap."""
    for _ in range(SAVED):
        gap.record_launch(at)
        gap.record_end(at, at)


def launch_batch(
    pacer: Pacer, at: float, plan: Plan, *shape: tuple[int, int], stock: bool = False, within: bool = False
) -> Running:
    """Launch the first batch of the plan, with short prompts that share its step."""
    cls, shorts = plan.order[0], len(plan.picked)
    count = shorts if cls == SHORT else len(plan.long.picked) + shorts * plan.mixed
    short = range(shorts if cls == SHORT or plan.mixed else 0)
    sent = Running(cls=cls, shape=list(shape) or [(50, 0)] * count, short=short, within=within, stock=stock)
    pacer.record_launch(at, sent, plan)
    return sent


def run_batch(
    pacer: Pacer,
    plan: Plan,
    begin: float,
    end: float,
    *shape: tuple[int, int],
    stock: bool = True,
    within: bool = False,
) -> None:
    """Launch and end the first batch of the plan."""
    end_batch(pacer, launch_batch(pacer, begin, plan, *shape, stock=stock, within=within), begin, end)


def end_batch(pacer: Pacer, sent: Running, begin: float, end: float, paused_s: float = 0.0) -> None:
    sent.started, sent.done, sent.paused_s = begin, end, paused_s
    pacer.record_result(sent, None, end)
