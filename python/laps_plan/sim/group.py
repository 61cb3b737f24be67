"""A simulated prefill server whose data-parallel attention ranks run every step together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from laps_plan.profile import Profile
from laps_plan.sim.engine import Events, Server
from laps_plan.sim.request import Request

Parts = list[tuple[Request, int, int]]
"""(request, new tokens, history tokens) of each request in a rank's batch."""


@dataclass(slots=True, eq=False)
class GroupBatch:
    """One step for the devices, or one slice of a step."""

    parts: list[Parts]
    """Work of each rank; a rank without work runs an idle batch."""
    ending: list[Request]
    """Requests whose prefill ends with this step."""
    seconds: float | None = None
    """Device time of the slice, if the policy has divided the step; None: the devices determine the time."""
    continues_step: bool = False
    """True for later slices of a step."""
    policy_step: Any = None
    """Step of the policy from which the batch was made."""
    begin: float = 0.0
    end: float = 0.0


class GroupPolicy(Protocol):
    """Scheduler of all ranks of a group. Times are simulated seconds."""

    @property
    def waiting_tokens(self) -> int:
        """Return the number of new tokens that wait."""

    def add(self, rank: int, request: Request, now: float) -> None:
        """Add a request to a rank's queue."""

    def next(self, now: float) -> GroupBatch | float | None:
        """Return a step to run, the time to ask again if no request arrives earlier, or None if there is no work."""

    def finished(self, batch: GroupBatch, now: float) -> None:
        """Process the results of a batch at ``now``."""


class Assign:
    """Assignment of requests to ranks: to the rank with the fewest tokens in progress, as SGLang counts them
    ("total_tokens"). A later turn of a session goes to the rank that holds its history."""

    def __init__(self, ranks: int) -> None:
        self._tokens = [0] * ranks
        self._home: dict[int, int] = {}

    def rank(self, request: Request) -> int:
        """Return the rank that a request goes to."""
        home = self._home.get(request.session)
        if home is None:
            home = self._tokens.index(min(self._tokens))
        if request.session >= 0:
            self._home[request.session] = home
        self._tokens[home] += request.prompt
        return home

    def answered(self, request: Request) -> None:
        """Take note that a request has its first token."""
        self._tokens[request.rank] -= request.prompt


class Ranks:
    """Devices of a group: time of a step, and time that ranks wait for the slowest rank."""

    def __init__(self, profile: Profile) -> None:
        if profile.group is None:
            raise ValueError(f"profile {profile.name} has no data-parallel attention ranks")
        self.profile = profile
        self.waited_s = 0.0
        """Time waited for the slowest rank, mean over the ranks."""
        self._cost = profile.group

    def seconds(self, batch: GroupBatch) -> float:
        """Return the time of a step, or of a slice if the policy has divided the step."""
        cost = self._cost
        shapes = [cost.shape((new, old) for _, new, old in parts) for parts in batch.parts]
        own = [cost.own_s(shape.tokens, cost.shape_s(shape)) for shape in shapes]
        step_s = cost.seconds(shapes)
        took_s = step_s if batch.seconds is None else batch.seconds
        self.waited_s += took_s / step_s * (max(own) - sum(own) / len(own))
        return took_s


class GroupServer(Server):
    """One prefill server of several ranks, which a fleet uses like any other server.

    In each round all ranks decide, the host prepares the step, and all ranks wait for the slowest. ``overlap``:
    SGLang's overlap loop, which decides on a step when the step before it starts.
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
        decision: GroupBatch | float | None = self._following
        # A step decided on while the devices were busy is already prepared, and so is a later slice of a step.
        prepared, self._following = decision is not None, None
        if decision is None:
            decision = self.scheduler.next(now)
        self._decision_count += 1
        if decision is None:
            return
        if not isinstance(decision, GroupBatch):
            self._events.at(decision, self._wake, self._decision_count)
            return
        self._running = True
        decision.begin = now + (0.0 if prepared or decision.continues_step else self._step_host_s)
        took_s = self.device.seconds(decision)
        decision.end = decision.begin + took_s
        self.busy_s += took_s
        self.batches += not decision.continues_step
        self._events.at(decision.end, self._done, decision)
        if self._overlap:
            following = self.scheduler.next(decision.begin)
            self._following = following if isinstance(following, GroupBatch) else None

    def _done(self, now: float, batch: Any) -> None:
        self.scheduler.finished(batch, now)
        for request in batch.ending:
            self._assign.answered(request)
            self.answered(now + self._reply_s, request)
            self.ended(now + self._reply_s, request)
        self._events.at(now + self._poll_s, self._again, None)
