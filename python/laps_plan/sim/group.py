"""A simulated prefill server whose data-parallel attention ranks run every step together."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from laps_plan.profile import Profile
from laps_plan.sim.engine import Events, Server
from laps_plan.sim.request import Request

Parts = list[tuple[Request, int, int]]
"""(request, new tokens, history tokens) of each in a rank's batch."""


@dataclass(slots=True, eq=False)
class GroupBatch:
    """One step on its way to the devices."""

    parts: list[Parts]
    """Work of each rank; one without any runs an idle batch."""
    ending: list[Request]
    """Requests whose prefill ends with it."""
    seconds: float | None = None
    """Device time, where the policy has divided it into slices; None = what the devices take."""
    goes_on: bool = False
    """True for later slices of a step."""
    whole: Any = None
    """Step of the policy that it was made from."""
    begin: float = 0.0
    end: float = 0.0


class GroupPolicy(Protocol):
    """Decides for all ranks of a group. Times are simulated seconds."""

    @property
    def waiting_tokens(self) -> int:
        """New tokens that wait."""

    def add(self, rank: int, request: Request, now: float) -> None:
        """A request comes to a rank."""

    def next(self, now: float) -> GroupBatch | float | None:
        """A step to run, the time to ask again unless something comes before, or None: nothing to do."""

    def finished(self, batch: GroupBatch, now: float) -> None:
        """Process the results of a batch at ``now``."""


AssignRule = Literal["total_tokens", "random"]


class Assign:
    """A rank for each new request; a later turn of a session goes where its history is."""

    def __init__(self, ranks: int, rule: AssignRule, seed: int) -> None:
        """``rule``: "total_tokens" (fewest tokens under way, as SGLang counts them), or "random": by bootstrap room,
        the default of prefill servers."""
        self._tokens = [0] * ranks
        self._random = random.Random(f"{seed} ranks") if rule == "random" else None
        self._home: dict[int, int] = {}

    def rank(self, request: Request) -> int:
        """Return the rank that a request goes to."""
        home = self._home.get(request.session)
        if home is None:
            tokens = self._tokens
            home = tokens.index(min(tokens)) if self._random is None else self._random.randrange(len(tokens))
        if request.session >= 0:
            self._home[request.session] = home
        self._tokens[home] += request.prompt
        return home

    def answered(self, request: Request) -> None:
        """Take note that a request has its first token."""
        self._tokens[request.rank] -= request.prompt


class Ranks:
    """The devices of a group: how long a step takes, and how long ranks waited for the slowest."""

    def __init__(self, profile: Profile) -> None:
        if profile.group is None:
            raise ValueError(f"profile {profile.name} has no data-parallel attention ranks")
        self.profile = profile
        self.waited_s = 0.0
        """Mean over the ranks."""
        self._cost = profile.group

    def seconds(self, batch: GroupBatch) -> float:
        """Time of a step or, where the policy has divided it, of a slice."""
        cost = self._cost
        shapes = [cost.shape((new, old) for _, new, old in parts) for parts in batch.parts]
        own = [cost.own_s(shape.tokens, cost.shape_s(shape)) for shape in shapes]
        step_s = cost.seconds(shapes)
        took_s = step_s if batch.seconds is None else batch.seconds
        self.waited_s += took_s / step_s * (max(own) - sum(own) / len(own))
        return took_s


class GroupServer(Server):
    """One prefill server of several ranks, to a fleet like any other server.

    Each round all ranks decide, the host prepares the step, and all wait for the slowest. ``overlap``: SGLang's overlap
    loop, which decides on a step when the one before it starts.
    """

    scheduler: GroupPolicy  # type: ignore[assignment]
    device: Ranks  # type: ignore[assignment]

    def __init__(
        self, name: str, policy: GroupPolicy, device: Ranks, events: Events, assign: Assign, *, overlap: bool = False
    ) -> None:
        super().__init__(name, policy, device, events)  # type: ignore[arg-type]
        self._assign = assign
        self._overlap = overlap
        self._following: GroupBatch | None = None  # type: ignore[assignment]

    def _ready(self, now: float, request: Request) -> None:
        request.ready = now
        request.rank = self._assign.rank(request)
        self.scheduler.add(request.rank, request, now)
        if not self._running:
            self._round(now)

    def _round(self, now: float) -> None:
        said: GroupBatch | float | None = self._following
        # What was decided while the devices were busy is prepared, and so is what a slice goes on with.
        prepared, self._following = said is not None, None
        if said is None:
            said = self.scheduler.next(now)
        self._asked += 1
        if said is None:
            return
        if not isinstance(said, GroupBatch):
            self._events.at(said, self._wake, self._asked)
            return
        self._running = True
        said.begin = now + (0.0 if prepared or said.goes_on else self._step_host_s)
        took_s = self.device.seconds(said)
        said.end = said.begin + took_s
        self.busy_s += took_s
        self.batches += not said.goes_on
        self._events.at(said.end, self._done, said)
        if self._overlap:
            following = self.scheduler.next(said.begin)
            self._following = following if isinstance(following, GroupBatch) else None

    def _done(self, now: float, batch: Any) -> None:
        self.scheduler.finished(batch, now)
        for request in batch.ending:
            self._assign.answered(request)
            self.answered(now + self._reply_s, request)
            self.ended(now + self._reply_s, request)
        self._events.at(now + self._poll_s, self._again, None)
