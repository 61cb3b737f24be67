"""Counts of how often each expert is chosen. SGLang rebalances experts by these counts (--enable-eplb) and records them
(--expert-distribution-recorder-mode), one pass at a time. The counts of a paused pass are kept until the pass goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.utils.common import Withable

Counts = list[tuple[Any, dict[str, Any]]]
"""SGLang's counters, each with a copy of its tables and lists."""


def copy_counts() -> Counts:
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
    """Restore the counts of a paused pass, because other passes have changed the counters since."""
    for gatherer, values in counts:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                # A captured graph counts in this tensor, so it must stay the same object.
                getattr(gatherer, name).copy_(value)
            else:
                setattr(gatherer, name, value)


@contextmanager
def aside(runner: Any) -> Iterator[None]:
    """Let passes in a pause count experts but not rebalance them: the paused pass would go on with moved experts."""
    recorder = vars(get_global_expert_distribution_recorder())
    held, manager = dict(recorder), getattr(runner, "eplb_manager", None)
    # SGLang's recorder can be in only one pass, and one layer of the pass, at a time.
    recorder.update({name: Withable() for name, value in held.items() if isinstance(value, Withable)})
    runner.eplb_manager = None
    try:
        yield
    finally:
        recorder.update(held)
        runner.eplb_manager = manager
