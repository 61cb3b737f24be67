"""Policies of a group of ranks: SGLang's on each rank, and LAPS's joint plan."""

from __future__ import annotations

from dataclasses import dataclass

from laps_core.config import LapsConfig
from laps_core.group.choice import Choice
from laps_core.group.menu import Menu
from laps_core.group.planner import GroupPlanner
from laps_core.group.prompt import Prompt

from laps_plan.profile import Profile
from laps_plan.sim.group import GroupBatch, Parts
from laps_plan.sim.metrics import RANK_CHUNK
from laps_plan.sim.request import Batch, Request
from laps_plan.sim.stock import POLICIES, Stock


class PerRank:
    """A stock policy on each rank, which decides for itself; a rank without work runs an idle batch."""

    def __init__(self, ranks: int, policy: str, chunk: int) -> None:
        """``chunk``: maximum new tokens of a rank's batch."""
        self._ranks: list[Stock] = [POLICIES[policy](chunk) for _ in range(ranks)]

    @property
    def waiting_tokens(self) -> int:
        return sum(rank.waiting_tokens for rank in self._ranks)

    def add(self, rank: int, request: Request, now: float) -> None:
        self._ranks[rank].add(request, now)

    def next(self, now: float) -> GroupBatch | float | None:
        said = [rank.next(now) for rank in self._ranks]
        batches = [b if isinstance(b, Batch) else Batch([], []) for b in said]
        if any(b.parts for b in batches):
            return GroupBatch([b.parts for b in batches], [r for b in batches for r in b.ending], policy_step=batches)
        return None

    def finished(self, batch: GroupBatch, now: float) -> None:
        for rank, own in zip(self._ranks, batch.policy_step, strict=True):
            if own.parts:
                own.begin, own.end = batch.begin, batch.end
                rank.finished(own, now)


@dataclass(eq=False)
class _Step:
    """A step of the joint plan, and its remaining work."""

    batch: GroupBatch
    cut: list[tuple[int, Request, Prompt]]
    """(rank, request, remaining prompt) of prompts that continue in a later step."""
    choice: Choice
    menus: list[Menu]
    slice_s: float = 0.0
    left: int = 1


class Joint:
    """LAPS's joint plan, made by the code that the ranks of a server run."""

    def __init__(self, profile: Profile, config: LapsConfig) -> None:
        cost = profile.group_with_host
        assert cost is not None
        self._cost, self._host_s = cost, profile.step_host_s
        layers, ranks = profile.layers if config.slice_ms else None, range(cost.ranks)
        self._planners = [GroupPlanner(cost, config, chunk=RANK_CHUNK, layers=layers) for _ in ranks]
        self._waiting: list[list[tuple[Request, Prompt]]] = [[] for _ in ranks]
        self._under_way: list[_Step] = []
        self._following: _Step | None = None
        self._fresh = False
        """True if a request has arrived since the last decision: only then can a step preempt."""
        self.waiting_tokens = 0

    def add(self, rank: int, request: Request, now: float) -> None:
        prompt = Prompt.of(self._cost, request.left, request.history, now, RANK_CHUNK)
        self._planners[rank].count_arrival(prompt.weight)
        self._waiting[rank].append((request, prompt))
        self.waiting_tokens += request.left
        self._fresh = True

    def next(self, now: float) -> GroupBatch | float | None:
        slices = self._planners[0].slices
        following, self._following = self._following, None
        if slices is None or following is not None or not self._under_way:
            step = following or self._decided(now)
            return None if step is None else self._begun(step)
        if slices.may_preempt and self._fresh:
            self._following = self._decided(now)
        return self._slice(self._under_way[-1])

    def _decided(self, now: float) -> _Step | None:
        """Return the step that all ranks agree on; its work is taken from the queues."""
        planners, self._fresh = self._planners, False
        both = zip(planners, self._waiting, strict=True)
        menus = [planner.menu(now, [prompt for _, prompt in waiting]) for planner, waiting in both]
        choice, *others = [planner.decide(menus) for planner in planners]
        assert all(other == choice for other in others), "ranks disagree"
        if choice is None:
            return None
        step = _Step(GroupBatch([], []), [], choice, menus)
        for rank in range(len(planners)):
            step.batch.parts.append(self._taken(rank, step, now))
        return step

    def _taken(self, rank: int, step: _Step, now: float) -> Parts:
        waiting, parts = self._waiting[rank], []
        picks = self._planners[rank].picks(step.choice)
        for i, tokens in picks:
            request, prompt = waiting[i]
            parts.append((request, tokens, request.history))
            if request.started < 0.0:
                request.started = now
            request.left -= tokens
            request.history += tokens
            self.waiting_tokens -= tokens
            if request.left:
                step.cut.append((rank, request, prompt.after(self._cost, tokens)))
            else:
                step.batch.ending.append(request)
        for i in sorted((i for i, _ in picks), reverse=True):
            del waiting[i]
        return parts

    def _begun(self, step: _Step) -> GroupBatch:
        parts = [planner.slices.start_step(step.menus, step.choice) for planner in self._planners if planner.slices]
        if not parts:
            self._put_back(step)
            return step.batch
        shapes = [self._cost.shape((new, old) for _, new, old in own) for own in step.batch.parts]
        step.left, step.slice_s = parts[0], (self._cost.seconds(shapes) - self._host_s) / parts[0]
        self._under_way.append(step)
        return self._slice(step, continues_step=False)

    def _slice(self, step: _Step, continues_step: bool = True) -> GroupBatch:
        step.left -= 1
        ending = [] if step.left else step.batch.ending
        return GroupBatch(step.batch.parts, ending, step.slice_s, continues_step, step)

    def finished(self, batch: GroupBatch, now: float) -> None:
        step: _Step | None = batch.policy_step
        if step is None:
            return
        for planner in self._planners:
            if planner.slices is not None:
                planner.slices.record_slice(self._cost.step_s)
        if not step.left:
            self._under_way.remove(step)
            self._put_back(step)

    def _put_back(self, step: _Step) -> None:
        for rank, request, prompt in step.cut:
            self._waiting[rank].append((request, prompt))
