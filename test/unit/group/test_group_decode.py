"""Ranks that plan together, prefill and decode: prompts leave time for decode steps, and streams for prompts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from groups import COST, Group, make_prompt
from laps_core.group.choice import Choice
from laps_core.group.menu import Menu
from laps_core.policy.decode import PROMPT_SHARE, Decode

STEP_S = 0.02
"""Time of a decode step of all ranks (seconds)."""


class Ranks(Group):
    """Ranks with prompts and endless streams."""

    def __init__(self, target_ms: float, streams: list[int]) -> None:
        super().__init__()
        self.decodes = [Decode(target_ms) for _ in self.planners]
        self.streams = streams
        self.prefill_s = 0.0
        self.gaps_s: list[float] = []
        self._last_s = [0.0] * COST.ranks
        for decode, n in zip(self.decodes, streams, strict=True):
            decode.set_streams(self.now, n)
        self.decode()

    def menu(self, rank: int) -> Menu:
        decode = self.decodes[rank]
        decode.set_streams(self.now, self.streams[rank])
        time_left_s, owed_s = decode.time_to_next_step_s(self.now), decode.owed_s(self.now)
        return self.planners[rank].menu(self.now, self.waiting[rank], until_decode_s=time_left_s, owed_s=owed_s)

    def decode(self) -> None:
        """Run a decode step of all ranks."""
        begin, self.now = self.now, self.now + STEP_S
        self._tokens(range(COST.ranks), begin, None)

    def step(self) -> Choice | None:
        """Run one round and its step of prompts, during which ranks without prompts decode."""
        begin, choice = self.now, super().step()
        if choice is not None:
            self.prefill_s += self.now - begin
            self._tokens([rank for rank, ran in enumerate(self.ran) if not ran], begin, 0.0)
        return choice

    def _tokens(self, ranks: Iterable[int], begin: float, rows_s: float | None) -> None:
        for rank in ranks:
            if self.streams[rank]:
                self.decodes[rank].record_launch()
                self.decodes[rank].record_step(begin, self.now, streams=self.streams[rank], within=False, rows_s=rows_s)
                self.gaps_s.append(self.now - self._last_s[rank])
                self._last_s[rank] = self.now

    def run(self, seconds: float) -> None:
        """Run rounds for this time; decode when no step is decided."""
        until = self.now + seconds
        while self.now < until:
            if self.step() is None:
                self.decode()


def test_prefill_step_ends_before_decode_step_is_due() -> None:
    ranks = Ranks(400.0, [4, 0, 0, 0])
    ranks.waiting[1] += [make_prompt(100_000)]
    choice = ranks.decide()
    assert choice is not None
    assert choice.seconds <= 0.4 - STEP_S
    free = Ranks(400.0, [0, 0, 0, 0])
    free.waiting[1] += [make_prompt(100_000)]
    longer = free.decide()
    assert longer is not None
    assert longer.seconds > choice.seconds


def test_late_prefill_step_waits_for_decode_step() -> None:
    ranks = Ranks(400.0, [4, 0, 0, 0])
    ranks.waiting[1] += [make_prompt(100_000)]
    ranks.now += 0.37
    assert ranks.decide() is None
    ranks.decode()
    assert ranks.decide() is not None


def test_share_owed_to_prompts_runs_despite_short_target() -> None:
    ranks = Ranks(1.0, [4, 4, 4, 4])
    ranks.waiting[0] += [make_prompt(300)]
    choice = ranks.decide()
    assert choice is not None
    assert choice.seconds > 0.001


@pytest.mark.parametrize("target_ms", [20.0, 150.0, 500.0])
def test_prompts_get_their_share_and_token_gaps_stay_bounded(target_ms: float) -> None:
    rng = random.Random(target_ms)
    ranks = Ranks(target_ms, [8, 1, 0, 3])
    for _ in range(40):
        for waiting in ranks.waiting:
            waiting += [
                make_prompt(*rng.choice(((rng.randint(1, 250), 0), (3000, 0), (20_000, 2000))), ranks.now)
                for _ in range(rng.randint(0, 3))
            ]
        ranks.run(0.5)
    assert ranks.prefill_s >= PROMPT_SHARE * ranks.now - STEP_S
    smallest_s = COST.step_s + 0.05
    assert max(ranks.gaps_s) <= max(1e-3 * target_ms, smallest_s) + 2 * STEP_S + smallest_s
    assert not math.isinf(max(ranks.gaps_s))
