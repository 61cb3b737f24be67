"""One simulated request, and the batch it runs in."""

from __future__ import annotations

from typing import Any

from laps_core.scheduling.plan import Running

from benchmark.workloads.job import Job


class Request:
    """What a client asks for, and how far it has come. Lengths are tokens, times seconds of simulated time."""

    __slots__ = (
        "at",
        "cached",
        "class_tokens",
        "history",
        "job",
        "lease",
        "left",
        "mark",
        "number",
        "prompt",
        "ready",
        "session",
        "slo_s",
        "started",
        "view",
    )

    def __init__(
        self,
        number: int,
        at: float,
        new: int,
        cached: int = 0,
        *,
        session: int = -1,
        slo_s: float | None = None,
    ) -> None:
        """``number``: unique. ``session``: its history is cached only where that session was served; -1: anywhere."""
        self.number = number
        self.at = at
        self.prompt = new + cached
        self.cached = cached
        self.session = session
        self.slo_s = slo_s
        self.left = new
        """Tokens still to compute."""
        self.history = cached
        """Tokens in the cache, its own finished chunks included."""
        self.ready = at
        """When the scheduler sees it."""
        self.started = -1.0
        """When its first batch was sent to the device; negative before."""
        self.class_tokens = 0
        """Tokens that count for its length class."""
        self.view: Any = None
        """What the policy is shown of it."""
        self.mark = 0
        """Tokens the server had processed when it came (response ratio)."""
        self.job: Job | None = None
        """What it was made of."""
        self.lease: Any = None
        """The router's account of it."""

    @classmethod
    def of(cls, job: Job) -> Request:
        """What a job becomes when it is sent."""
        request = cls(
            job.number, job.at_s, job.new, job.cached, session=job.stream if job.goes_on else -1, slo_s=job.slo_s
        )
        request.job = job
        return request


class Batch:
    """A batch on its way to the device. ``parts``: (request, new tokens, history tokens) of each."""

    __slots__ = ("begin", "end", "ending", "parts", "replayed", "running", "seconds", "whole")

    def __init__(self, parts: list[tuple[Request, int, int]], ending: list[Request]) -> None:
        self.parts = parts
        self.ending = ending
        """Requests whose prefill ends with it."""
        self.running: Running | None = None
        self.seconds: float | None = None
        """Device time, where the scheduler has divided it; None = what the device takes."""
        self.whole: Any = None
        """What it is a slice of."""
        self.begin = self.end = 0.0
        self.replayed = False
        """From a full graph."""
