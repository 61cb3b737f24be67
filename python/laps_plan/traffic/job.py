"""One request of a load, as lengths and times without text."""

from __future__ import annotations

from dataclasses import dataclass

SHORT, LONG = "short", "long"
THRESHOLD = 256
"""Longest short request (new tokens): LAPS's own default."""


@dataclass(frozen=True, slots=True)
class Job:
    """Due time of a request, its number of tokens, and how many of them an earlier request had, too."""

    at_s: float
    new: int
    """Tokens that no earlier request had."""
    cached: int = 0
    """Tokens before the new tokens: the beginning of ``stream``."""
    stream: int = 0
    continues_stream: bool = False
    """True if the new tokens continue the stream (a conversation): its history is cached where the conversation was
    served. False if they are the job's own: any history is then cached everywhere, as in a shared cache."""
    after: int | None = None
    """Index of the job whose answer this job needs: it is due after that answer, if that is later than ``at_s``."""
    slo_s: float | None = None
    """Deadline of the request as sent to the server (seconds to the first token)."""
    client: int = -1
    pause_s: float = 0.0
    """Minimum time after the answer that the job needs: the client's own time (seconds)."""
    number: int = 0
    """Unique number in the load, if the load follows answers or is simulated."""
    output: int = 1
    """Tokens of the answer, if a server that decodes is simulated."""

    @property
    def kind(self) -> str:
        return SHORT if self.new <= THRESHOLD else LONG
