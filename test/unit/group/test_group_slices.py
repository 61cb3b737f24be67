"""A step of whole requests preempts a longer step on all ranks if that pays, and not too often."""

from __future__ import annotations

from collections.abc import Sequence

from groups import COST, Group, add_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.group.choice import Choice
from laps_core.group.menu import Menu
from laps_core.group.slices import DEPTH, LONGER
from laps_core.policy.fairness import SAVED

LAYERS = 61
SLICE_S = LONGER * LapsConfig.slice_ms / 1e3
DOCUMENT = (100_000, 0)


class SlicedGroup(Group):
    """Ranks whose steps run in slices."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)

    def menus(self) -> list[Menu]:
        return [p.menu(self.now, w) for p, w in zip(self.planners, self.waiting, strict=True)]

    def decide(self) -> Choice | None:
        menus = self.menus()
        decided = {p.decide(menus) for p in self.planners}
        assert len(decided) == 1
        return decided.pop()

    def begin(self) -> int:
        """Start the next step and return its number of slices."""
        menus = self.menus()
        choice, *others = [p.decide(menus) for p in self.planners]
        assert choice is not None
        assert all(other == choice for other in others)
        return self.start(menus, choice)

    def start(self, menus: Sequence[Menu], choice: Choice) -> int:
        self.ran = [self._run(p, w, choice) for p, w in zip(self.planners, self.waiting, strict=True)]
        parts = {p.slices.start_step(menus, choice) for p in self.planners if p.slices is not None}
        assert len(parts) == 1
        return parts.pop()

    def slice(self) -> None:
        for p in self.planners:
            assert p.slices is not None
            p.slices.record_slice(COST.step_s)

    @property
    def open(self) -> bool:
        said = {p.slices is not None and p.slices.may_preempt for p in self.planners}
        assert len(said) == 1
        return said.pop()


def test_short_request_preempts_long_prompt_step() -> None:
    group = SlicedGroup()
    add_prompts(group, [[DOCUMENT] * 3] * 4)
    parts = group.begin()
    assert parts > 10
    assert not any(p.tokens <= 200 for ran in group.ran for p, _ in ran)
    group.slice()
    group.add(1, 100)
    assert group.open
    menus = group.menus()
    choice = group.planners[0].decide(menus)
    assert choice is not None
    assert [p.decide(menus) for p in group.planners[1:]] == [choice] * 3
    group.start(menus, choice)
    assert [(p.tokens, n) for ran in group.ran for p, n in ran] == [(100, 100)]


def test_long_prompt_does_not_preempt_another() -> None:
    group = SlicedGroup()
    add_prompts(group, [[DOCUMENT] * 2] * 4)
    group.begin()
    group.slice()
    group.add(0, *DOCUMENT)
    assert group.decide() is None


def test_step_near_its_end_may_not_be_preempted() -> None:
    group = SlicedGroup()
    add_prompts(group, [[DOCUMENT]] * 4)
    parts = group.begin()
    for _ in range(parts - 1):
        group.slice()
    assert not group.open


def test_preemptions_are_limited_to_saved_ones_plus_time_share() -> None:
    group = SlicedGroup()
    count, time = 0, 0.0
    add_prompts(group, [[DOCUMENT] * 10] * 4)
    while time < 30.0:
        slices = group.planners[0].slices
        assert slices is not None
        if not slices.paused:
            group.begin()
        group.add(2, 50)
        if group.open:
            menus = group.menus()
            decided = [p.decide(menus) for p in group.planners]
            if decided[0] is not None:
                group.start(menus, decided[0])
                count += 1
        # Run a slice of the newest step.
        time += slices._paused[-1].slice_s
        group.slice()
    assert 3 < count <= SAVED + time * LapsConfig.preempt_overhead / COST.step_s


def test_preemption_that_no_rank_can_build_costs_none() -> None:
    group = SlicedGroup()
    add_prompts(group, [[DOCUMENT] * 3] * 4)
    group.begin()
    group.slice()
    group.add(1, 100)
    for _ in range(2 * SAVED):
        assert group.open
        assert group.decide() is not None
    group.begin()
    assert group.planners[0].slices is not None
    assert SAVED - 1 <= group.planners[0].slices._saved < SAVED


@settings(deadline=None, max_examples=15)
@given(seconds=st.lists(st.floats(0.03, 3.0), min_size=1, max_size=4))
def test_slice_length_is_near_target_and_count_within_layers(seconds: list[float]) -> None:
    group = SlicedGroup()
    add_prompts(group, [[DOCUMENT]] * 4)
    menus = group.menus()
    slices = group.planners[0].slices
    assert slices is not None
    for step_s in seconds:
        parts = slices.start_step(menus, Choice(3, step_s, (step_s,) * 4, False))
        assert 1 <= parts <= LAYERS
        assert parts == 1 or step_s / parts >= SLICE_S * 0.99
        assert step_s <= 2 * SLICE_S or step_s / parts < max(3 * SLICE_S, step_s / (LAYERS - 1))
    assert slices.may_preempt == (len(seconds) <= DEPTH and parts > 1)
