"""Ranks that plan together and decode, too: their steps leave room for the streams' tokens, and streams for prompts."""

from __future__ import annotations

import math
import random

import pytest
from groups import CHUNK, COST, prompt
from laps_core.group.choice import Choice
from laps_core.group.menu import Menu
from laps_core.group.planner import GroupPlanner
from laps_core.group.prompt import Prompt
from laps_core.policy.decode import PROMPT_SHARE, Decode

STEP_S = 0.02
"""Time of a decode step of all ranks (seconds)."""


class Ranks:
    """Ranks with streams that never end, and prompts."""

    def __init__(self, target_ms: float, streams: list[int]) -> None:
        self.planners = [GroupPlanner(COST, chunk=CHUNK) for _ in range(COST.ranks)]
        self.decodes = [Decode(target_ms) for _ in self.planners]
        self.waiting: list[list[Prompt]] = [[] for _ in self.planners]
        self.streams, self.now = streams, 0.0
        self.prefill_s = self.decode_s = 0.0
        self.gaps_s: list[float] = []
        self._last_s = [0.0] * COST.ranks
        self._watch()
        self.decode()

    def plan(self) -> Choice | None:
        """One round: every rank must decide the same."""
        self._watch()
        rows = [
            planner.menu(self.now, waiting, room_s=decode.room_s(self.now), owed_s=decode.owed_s(self.now)).row()
            for planner, waiting, decode in zip(self.planners, self.waiting, self.decodes, strict=True)
        ]
        decided = [planner.decide([Menu.read(row) for row in rows]) for planner in self.planners]
        assert len(set(decided)) == 1
        return decided[0]

    def _watch(self) -> None:
        for decode, n in zip(self.decodes, self.streams, strict=True):
            decode.watch(self.now, n)

    def decode(self) -> None:
        """A step of all ranks that decode."""
        self._tokens(range(COST.ranks), STEP_S, None)
        self.decode_s += STEP_S

    def prefill(self, choice: Choice) -> None:
        """A step of prompts; ranks without any decode beside them."""
        own, idle = [], []
        for rank, (planner, waiting) in enumerate(zip(self.planners, self.waiting, strict=True)):
            picks = dict(planner.picks(choice))
            own.append(COST.shape((n, waiting[i].history) for i, n in picks.items()))
            waiting[:] = [p.after(COST, picks[i]) if i in picks else p for i, p in enumerate(waiting)]
            waiting[:] = [p for p in waiting if p.tokens]
            idle += [rank] * (not picks)
        took_s = COST.seconds(own)
        self._tokens(idle, took_s, 0.0)
        self.prefill_s += took_s

    def _tokens(self, ranks: list[int] | range, took_s: float, rows_s: float | None) -> None:
        begin, self.now = self.now, self.now + took_s
        for rank in ranks:
            if self.streams[rank]:
                self.decodes[rank].sent()
                self.decodes[rank].ran(begin, self.now, streams=self.streams[rank], within=False, rows_s=rows_s)
                self.gaps_s.append(self.now - self._last_s[rank])
                self._last_s[rank] = self.now

    def run(self, seconds: float) -> None:
        """Rounds for so long."""
        until = self.now + seconds
        while self.now < until:
            choice = self.plan()
            if choice is None:
                self.decode()
            else:
                self.prefill(choice)


def test_a_step_ends_before_the_next_decode_step_is_due() -> None:
    ranks = Ranks(400.0, [4, 0, 0, 0])
    ranks.waiting[1] += [prompt(100_000)]
    choice = ranks.plan()
    assert choice is not None
    assert choice.seconds <= 0.4 - STEP_S
    free = Ranks(400.0, [0, 0, 0, 0])
    free.waiting[1] += [prompt(100_000)]
    longer = free.plan()
    assert longer is not None
    assert longer.seconds > choice.seconds


def test_all_ranks_decode_where_no_step_would_end_in_time() -> None:
    ranks = Ranks(400.0, [4, 0, 0, 0])
    ranks.waiting[1] += [prompt(100_000)]
    ranks.now += 0.37
    assert ranks.plan() is None
    ranks.decode()
    assert ranks.plan() is not None


def test_what_is_owed_to_prompts_runs_though_it_takes_longer_than_the_target() -> None:
    ranks = Ranks(1.0, [4, 4, 4, 4])
    ranks.waiting[0] += [prompt(300)]
    choice = ranks.plan()
    assert choice is not None
    assert choice.seconds > 0.001


@pytest.mark.parametrize("target_ms", [20.0, 150.0, 500.0])
def test_streams_and_prompts_have_what_they_were_promised(target_ms: float) -> None:
    rng = random.Random(target_ms)
    ranks = Ranks(target_ms, [8, 1, 0, 3])
    for _ in range(40):
        for waiting in ranks.waiting:
            waiting += [
                prompt(*rng.choice(((rng.randint(1, 250), 0), (3000, 0), (20_000, 2000))), ranks.now)
                for _ in range(rng.randint(0, 3))
            ]
        ranks.run(0.5)
    assert ranks.prefill_s >= PROMPT_SHARE * ranks.now - STEP_S
    smallest_s = COST.step_s + 0.05
    assert max(ranks.gaps_s) <= max(1e-3 * target_ms, smallest_s) + 2 * STEP_S + smallest_s
    assert not math.isinf(max(ranks.gaps_s))
