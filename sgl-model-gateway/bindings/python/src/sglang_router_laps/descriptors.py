"""File descriptors: as many as the system gives, and no more requests at a time than they are enough for."""

from __future__ import annotations

import os
import resource

PER_REQUEST = 3
"""One connection of the client, one to a prefill and one to a decode server."""
PER_SERVER = 2
"""Probes and questions about its load."""
SPARE = 16
"""Log files, aborts, status pages, clients that only hold a connection open."""


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
