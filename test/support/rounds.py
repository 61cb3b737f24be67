"""Repetition of checks that need two events to coincide, until the events have coincided."""

from __future__ import annotations

from collections.abc import Callable

import pytest

ROUNDS = 8


def repeat_until(
    attempt: Callable[[int], bool], event: str, describe: Callable[[], object] = lambda: "", rounds: int = ROUNDS
) -> None:
    """Call ``attempt`` with 0, 1, and so on until it returns True, that is, until it has seen ``event`` happen.

    Fails the test after ``rounds`` rounds, with ``describe()`` in the message. For effects that a delayed machine can
    hide. ``attempt`` must use new prompts in each round, because earlier prompts are cached. ``attempt`` must assert by
    itself, in each round, what must never happen.
    """
    for i in range(rounds):
        if attempt(i):
            return
    pytest.fail(f"{event}: not in {rounds} rounds; {describe()}")
