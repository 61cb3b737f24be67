"""One request of a load, before it has any tokens."""

from __future__ import annotations

from dataclasses import dataclass

SHORT, LONG = "short", "long"
THRESHOLD = 256
"""Longest short request (new tokens): LAPS's own default."""


@dataclass(frozen=True, slots=True)
class Job:
    """When it is due, how many tokens it has, and which of them an earlier one had too."""

    at_s: float
    new: int
    """Tokens no request before it had."""
    cached: int = 0
    """Tokens before those: the beginning of ``stream``."""
    stream: int = 0
    goes_on: bool = False
    """True if the new tokens are the stream's next ones (a conversation), not tokens of its own. What comes before them
    is cached where the conversation was served; any other history everywhere, as in a shared cache."""
    after: int | None = None
    """Index of the job whose answer it needs: it is due then, if that is later than ``at_s``."""
    slo_s: float | None = None
    """Deadline of the request, which the server is told (seconds to the first token)."""
    client: int = -1
    pause_s: float = 0.0
    """After the answer that it needs, at least: the client's own time (seconds)."""
    number: int = 0
    """Unique in its load, where the load follows answers or is simulated."""
    output: int = 1
    """Tokens of its answer, where a server that decodes is simulated."""

    @property
    def kind(self) -> str:
        """Return the class of the request."""
        return SHORT if self.new <= THRESHOLD else LONG
