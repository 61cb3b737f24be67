"""Discovery of servers while the router runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from laps_core.pools.instances import Role


@dataclass(frozen=True, slots=True)
class Found:
    """A server that a source reports as ready."""

    role: Role
    url: str
    bootstrap_port: int | None = None
    life: str = ""
    """Text that distinguishes processes that follow each other at the same URL."""

    @property
    def kind(self) -> tuple[Role, int | None]:
        """Return the properties whose change makes it another server."""
        return self.role, self.bootstrap_port


Follow = Callable[[Collection[Found]], None]
"""Callback for all servers that a source knows."""


class Source(Protocol):
    """A source of servers."""

    @property
    def name(self) -> str:
        """Return the name for status and log."""

    async def run(self, follow: Follow) -> None:
        """Call ``follow`` with all servers, at first and at each change, but not while the servers are unknown. Ends
        when cancelled."""
