"""One simulated request, the batch it runs in, and its slices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from laps_core.policy.types import Running

from laps_plan.traffic.job import Job


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. Lengths are tokens, times seconds of simulated time."""

    number: int
    """Unique."""
    at: float
    left: int
    """Tokens still to compute."""
    cached: int = 0
    session: int = -1
    """Session; its history is cached only where it was served. -1: anywhere."""
    slo_s: float | None = None
    job: Job | None = None
    """Job that it was made from."""
    prompt: int = field(init=False)
    history: int = field(init=False)
    """Tokens in the cache, its own finished chunks included."""
    ready: float = field(init=False)
    """When the scheduler sees it."""
    started: float = -1.0
    """When its first batch was sent to the device; negative before."""
    class_tokens: int = 0
    """Tokens that count for its length class."""
    view: Any = None
    """View of the request for the policy."""
    line: Any = None
    """The same of a long one as it is now; None = it has changed since."""
    mark: int = 0
    """Tokens the server had processed when it came (response ratio)."""
    lease: Any = None
    """The router's account of it."""
    rank: int = 0
    """Data-parallel rank that serves it."""
    output: int = 1
    """Tokens of its answer; the first one comes with the prefill."""
    first_s: float = 0.0
    """When that one reached the client."""
    first_step: int = -1
    """The server's decode step that made the second one; -1: there was none yet."""

    def __post_init__(self) -> None:
        self.prompt, self.history, self.ready = self.left + self.cached, self.cached, self.at

    @classmethod
    def of(cls, job: Job) -> Request:
        """Return the request that a job sends."""
        session = job.stream if job.goes_on else -1
        return cls(job.number, job.at_s, job.new, job.cached, session, job.slo_s, job, output=job.output)


@dataclass(slots=True, eq=False)
class Batch:
    """A batch on its way to the device. ``parts``: (request, new tokens, history tokens) of each."""

    parts: list[tuple[Request, int, int]]
    ending: list[Request]
    """Requests whose prefill ends with it."""
    running: Running | None = None
    seconds: float | None = None
    """Device time, where the scheduler has divided it; None = what the device takes."""
    whole: Any = None
    """Batch that it is a slice of."""
    prepared: bool = False
    """While the device was busy: no host time passes before it."""
    begin: float = 0.0
    end: float = 0.0
    replayed: bool = False
    """From a full graph."""
    streams: int = 0
    """Requests that are decoded in it: without ``parts`` it is a decode step, with them a mixed chunk."""
    context: int = 0
    """Tokens of their contexts, all together."""
    last: list[Request] = field(default_factory=list)
    """Streams that end with this step."""
    within: bool = False
    """A decode step while a batch is paused."""


@dataclass(slots=True, eq=False)
class Sliced:
    """A long batch that runs in slices."""

    parts: list[tuple[Request, int, int]]
    ending: list[Request]
    running: Running
    slices: list[float]
    """Slices still to run (seconds), the last one first."""

    @property
    def left(self) -> int:
        """How many are still to run."""
        return len(self.slices)
