"""A group of ranks as unit tests need it: the terms of a DeepSeek-V3 node, and planners that share their rows."""

from __future__ import annotations

from collections.abc import Sequence

from laps_core.group.choice import Choice
from laps_core.group.cost import GroupCost
from laps_core.group.menu import Menu
from laps_core.group.planner import GroupPlanner
from laps_core.group.prompt import Prompt

CHUNK = 8192
COST = GroupCost(
    ranks=4, fixed=0.012, token=63e-6, alpha=4e-9, unpack=4.4e-6, absorbed=16.5e-9, own_floor=0.015, expert=19e-6,
    expert_floor=0.027,
)  # fmt: skip


def prompt(new: int, history: int = 0, since_s: float = 0.0, cost: GroupCost = COST) -> Prompt:
    """A request that came at ``since_s``."""
    return Prompt.of(cost, new, history, since_s, CHUNK)


class Group:
    """Ranks that exchange rows, each with its own planner, and run what they decide."""

    def __init__(self, cost: GroupCost = COST, **knobs: float) -> None:
        self.cost = cost
        self.planners = [GroupPlanner(cost, chunk=CHUNK, **knobs) for _ in range(cost.ranks)]  # type: ignore[arg-type]
        self.waiting: list[list[Prompt]] = [[] for _ in self.planners]
        self.now = 0.0
        self.ran: list[list[tuple[Prompt, int]]] = []
        """Batches of the step before: the prompts of each rank as they were, and tokens."""

    def add(self, rank: int, new: int, history: int = 0) -> Prompt:
        """A request comes to a rank now."""
        made = prompt(new, history, self.now, self.cost)
        self.planners[rank].came(made.weight)
        self.waiting[rank].append(made)
        return made

    def menu(self, rank: int) -> Menu:
        """Make the menu of a rank."""
        return self.planners[rank].menu(self.now, self.waiting[rank])

    def decide(self) -> Choice | None:
        """One round, of which nothing runs: every rank must decide the same."""
        rows = [self.menu(rank).row() for rank in range(self.cost.ranks)]
        decided = [p.decide([Menu.read(row) for row in rows]) for p in self.planners]
        assert len(set(decided)) == 1
        return decided[0]

    def step(self) -> Choice | None:
        """One round, and the step that it decides."""
        choice = self.decide()
        if choice is None:
            return None
        self.ran = [self._run(p, w, choice) for p, w in zip(self.planners, self.waiting, strict=True)]
        shapes = [self.cost.shape((n, p.history) for p, n in ran) for ran in self.ran]
        self.now += self.cost.seconds(shapes)
        return choice

    def tokens(self) -> int:
        """New tokens of the step before."""
        return sum(n for ran in self.ran for _, n in ran)

    def _run(self, planner: GroupPlanner, waiting: list[Prompt], choice: Choice) -> list[tuple[Prompt, int]]:
        picks = planner.picks(choice)
        ran = [(waiting[i], n) for i, n in picks]
        left = dict(picks)
        waiting[:] = [p if i not in left else p.after(self.cost, left[i]) for i, p in enumerate(waiting)]
        waiting[:] = [p for p in waiting if p.tokens]
        return ran


def fill(group: Group, lengths: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Requests of (new, history) tokens for each rank."""
    for rank, each in enumerate(lengths):
        for new, history in each:
            group.add(rank, new, history)
