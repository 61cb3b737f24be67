"""Rounds of what happens only where two things meet in time: tried again until they have met."""

from __future__ import annotations

from collections.abc import Callable

import pytest

ROUNDS = 8


def until_seen(once: Callable[[int], bool], what: str, told: Callable[[], object] = lambda: "") -> None:
    """Call ``once`` with 0, 1, and so on until it returns True: it has seen ``what`` is claimed to happen.

    For what a machine that is held up can hide, and what nothing but the claim can show. ``once`` needs prompts of its
    own in each round: those of the last one are cached. What must never happen it asserts itself, each time.
    """
    for i in range(ROUNDS):
        if once(i):
            return
    pytest.fail(f"{what}: not in {ROUNDS} rounds; {told()}")
