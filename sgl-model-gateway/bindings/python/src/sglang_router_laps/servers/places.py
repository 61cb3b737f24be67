"""How many requests may be in flight: as configured, and as many as the file descriptors are enough for."""

from __future__ import annotations

import logging
import os
import resource

logger = logging.getLogger(__name__)

MOST = 8192
"""Unless --max-concurrent-requests says otherwise: beyond, requests would only wait (requests)."""
PER_REQUEST = 3
"""One connection of the client, one to a prefill and one to a decode server."""
PER_SERVER = 2
"""Probes and questions about its load."""
SPARE = 16
"""Log files, aborts, status pages, clients that only hold a connection open."""


class Places:
    """What is in flight, and how much may be (requests)."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    @property
    def full(self) -> bool:
        """Whether one more request is to be turned away."""
        return self.taken >= self.most

    def fit(self, servers: int) -> None:
        """Raise this process's limit of descriptors, and lower ``most`` to what they are enough for."""
        limit = raise_limit()
        enough = requests_at_most(limit, servers)
        if enough < self.most:
            logger.warning("%d requests at a time instead of %d: %d file descriptors", enough, self.most, limit)
            self.most = enough


def raise_limit() -> int:
    """Raise this process's soft limit to its hard one. Returns the limit (descriptors)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # Some systems name a hard limit that they do not grant.
            return soft
    return hard


def requests_at_most(limit: int, servers: int) -> int:
    """How many requests ``limit`` descriptors are enough for, with what is open already and ``servers`` servers."""
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    return max(1, (limit - _open() - SPARE - PER_SERVER * servers) // PER_REQUEST)


def _open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return SPARE
