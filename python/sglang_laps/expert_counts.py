"""Counts of how often each expert is chosen, from which SGLang places experts anew (--enable-eplb) and which it records
(--expert-distribution-recorder-mode). It counts one pass at a time: those of a paused pass are kept until it goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.utils.common import Withable

Counts = list[tuple[Any, dict[str, Any]]]
"""Counters of SGLang, and the tables and lists of each so far."""


def hold() -> Counts:
    """Return a copy of the counts of the pass that is about to be paused."""
    recorder: Any = get_global_expert_distribution_recorder()
    if not recorder.recording or not recorder._record_current_pass:
        return []
    return [(g, dict(_copies(g))) for g in recorder._single_pass_gatherers.values()]


def _copies(gatherer: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(gatherer).items():
        if isinstance(value, torch.Tensor):
            yield name, value.clone()
        elif isinstance(value, dict | list):
            yield name, value.copy()


def put_back(counts: Counts) -> None:
    """The pass goes on from these counts; others have been there since."""
    for gatherer, values in counts:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                # A graph that was captured counts in this very table.
                getattr(gatherer, name).copy_(value)
            else:
                setattr(gatherer, name, value)


@contextmanager
def aside(runner: Any) -> Iterator[None]:
    """Passes in a pause count, but do not place experts anew: what is paused would meet others in the middle."""
    recorder = vars(get_global_expert_distribution_recorder())
    held, manager = dict(recorder), getattr(runner, "eplb_manager", None)
    # SGLang allows for one pass, and one layer of it, at a time.
    recorder.update({name: Withable() for name, value in held.items() if isinstance(value, Withable)})
    runner.eplb_manager = None
    try:
        yield
    finally:
        recorder.update(held)
        runner.eplb_manager = manager
