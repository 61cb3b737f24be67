"""Repetition of checks that need two events to coincide, until the events have coincided."""

from __future__ import annotations

from collections.abc import Callable

import pytest

ROUNDS = 8


def until_seen(once: Callable[[int], bool], what: str, told: Callable[[], object] = lambda: "") -> None:
    """Call ``once`` with 0, 1, and so on until it returns True, that is, until it has seen ``what`` happen.

    Fails the test after ``ROUNDS`` rounds, with ``told()`` in the message. For effects that a delayed machine can hide.
    ``once`` must use new prompts in each round, because earlier prompts are cached. ``once`` must assert by itself, in
    each round, what must never happen.
    """
    for i in range(ROUNDS):
        if once(i):
            return
    pytest.fail(f"{what}: not in {ROUNDS} rounds; {told()}")
