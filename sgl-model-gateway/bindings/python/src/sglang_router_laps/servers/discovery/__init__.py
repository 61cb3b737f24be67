"""Where it is asked which servers there are, while the router runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from ..instances import Role


@dataclass(frozen=True, slots=True)
class Found:
    """A server that is said to be ready."""

    role: Role
    url: str
    bootstrap_port: int | None = None
    life: str = ""
    """Which of the servers that have been at this URL one after the other."""


Follow = Callable[[Collection[Found]], None]
"""Takes all servers that a source knows of."""


class Source(Protocol):
    """Somebody who knows servers."""

    @property
    def name(self) -> str:
        """For status and log."""

    async def run(self, follow: Follow) -> None:
        """Tell ``follow`` who is there, at first and at each change. While that cannot be found out it is told
        nothing. Ends when cancelled."""
