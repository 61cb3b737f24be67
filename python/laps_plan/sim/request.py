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
    """Session; its history is cached only on servers that served it. -1: no session, cached on every server."""
    slo_s: float | None = None
    job: Job | None = None
    """Job from which the request was made."""
    prompt: int = field(init=False)
    history: int = field(init=False)
    """Tokens in the cache, including the request's own finished chunks."""
    ready: float = field(init=False)
    """Time at which the scheduler receives the request."""
    started: float = -1.0
    """Time at which the first batch of the request is sent to the device; negative before."""
    class_tokens: int = 0
    """Tokens that determine the length class."""
    view: Any = None
    """View of the request for the policy."""
    current_view: Any = None
    """Current view of a long request; None = the request has changed since the last view."""
    processed_at_arrival: int = 0
    """Tokens that the server had processed when the request arrived (for the response ratio)."""
    lease: Any = None
    """Router's record of the request."""
    rank: int = 0
    """Data-parallel rank that serves the request."""
    output: int = 1
    """Tokens of the answer; the prefill makes the first token."""
    first_s: float = 0.0
    """Time at which the first token reaches the client."""
    first_step: int = -1
    """Number of the server's decode step that makes the second token; -1 before decoding."""

    def __post_init__(self) -> None:
        self.prompt, self.history, self.ready = self.left + self.cached, self.cached, self.at

    @classmethod
    def of(cls, job: Job) -> Request:
        """Return the request that a job sends."""
        session = job.stream if job.continues_stream else -1
        return cls(job.number, job.at_s, job.new, job.cached, session, job.slo_s, job, output=job.output)


@dataclass(slots=True, eq=False)
class Batch:
    """A batch on its way to the device. ``parts``: (request, new tokens, history tokens) of each."""

    parts: list[tuple[Request, int, int]]
    ending: list[Request]
    """Requests whose prefill ends with this batch."""
    running: Running | None = None
    seconds: float | None = None
    """Device time, if the scheduler determines it, as for slices; None: the device determines it."""
    sliced_batch: Any = None
    """Batch that this batch is a slice of."""
    prepared: bool = False
    """True if prepared while the device was busy: no host time passes before the batch."""
    begin: float = 0.0
    end: float = 0.0
    streams: int = 0
    """Number of requests decoded in this batch. Without ``parts`` it is a decode step, with ``parts`` a mixed chunk."""
    context: int = 0
    """Total tokens of the contexts of ``streams``."""
    last: list[Request] = field(default_factory=list)
    """Streams that end with this step."""
    within: bool = False
    """True for a decode step in a pause of another batch."""


@dataclass(slots=True, eq=False)
class Sliced:
    """A long batch that runs in slices."""

    whole: Batch
    running: Running
    slices: list[float]
    """Remaining slices (seconds), the last slice first."""

    @property
    def left(self) -> int:
        """Return the number of remaining slices."""
        return len(self.slices)
