"""Group of ranks for unit tests: cost terms of a DeepSeek-V3 node, and planners that exchange their rows."""

from __future__ import annotations

from collections.abc import Sequence

from laps_core.config import LapsConfig
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


def make_prompt(new: int, history: int = 0, since_s: float = 0.0, cost: GroupCost = COST) -> Prompt:
    """Return a request that arrived at ``since_s``."""
    return Prompt.of(cost, new, history, since_s, CHUNK)


class Group:
    """Ranks with one planner each, which exchange rows and run the step that they decide."""

    def __init__(self, cost: GroupCost = COST, layers: int | None = None, **knobs: float) -> None:
        """`knobs`: of ``LapsConfig``."""
        self.cost, config = cost, LapsConfig(**knobs)  # type: ignore[arg-type]
        self.planners = [GroupPlanner(cost, config, chunk=CHUNK, layers=layers) for _ in range(cost.ranks)]
        self.waiting: list[list[Prompt]] = [[] for _ in self.planners]
        self.now = 0.0
        self.ran: list[list[tuple[Prompt, int]]] = []
        """Batches of the last step, by rank: each prompt as it was before the step, and its new tokens in the step."""

    def add(self, rank: int, new: int, history: int = 0) -> Prompt:
        """Add a request that arrives at a rank now."""
        prompt = make_prompt(new, history, self.now, self.cost)
        self.planners[rank].count_arrival(prompt.weight)
        self.waiting[rank].append(prompt)
        return prompt

    def menu(self, rank: int) -> Menu:
        """Return the menu of a rank."""
        return self.planners[rank].menu(self.now, self.waiting[rank])

    def decide(self) -> Choice | None:
        """Run one round without its step. Every rank must decide the same."""
        rows = [self.menu(rank).row() for rank in range(self.cost.ranks)]
        decided = [p.decide([Menu.read(row) for row in rows]) for p in self.planners]
        assert len(set(decided)) == 1
        return decided[0]

    def step(self) -> Choice | None:
        """Run one round and the step that the ranks decide."""
        choice = self.decide()
        if choice is None:
            return None
        self.ran = [self._run(p, w, choice) for p, w in zip(self.planners, self.waiting, strict=True)]
        shapes = [self.cost.shape((n, p.history) for p, n in ran) for ran in self.ran]
        self.now += self.cost.seconds(shapes)
        return choice

    def tokens(self) -> int:
        """Return the new tokens of the last step."""
        return sum(n for ran in self.ran for _, n in ran)

    def _run(self, planner: GroupPlanner, waiting: list[Prompt], choice: Choice) -> list[tuple[Prompt, int]]:
        picks = planner.picks(choice)
        ran = [(waiting[i], n) for i, n in picks]
        left = dict(picks)
        waiting[:] = [p if i not in left else p.after(self.cost, left[i]) for i, p in enumerate(waiting)]
        waiting[:] = [p for p in waiting if p.tokens]
        return ran


def add_prompts(group: Group, lengths: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Add requests to each rank. ``lengths``: for each rank, (new, history) tokens of its requests."""
    for rank, prompts in enumerate(lengths):
        for new, history in prompts:
            group.add(rank, new, history)
