"""LAPS for one scheduler, put together when it starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from laps_core.config import AUTO, ConfigError, LapsConfig
from laps_core.length import unit_of
from laps_core.scheduling.pacer import Pacer
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.runtime_context import get_parallel, get_serving

from sglang_laps import saved_model, slices
from sglang_laps.builder import Builder
from sglang_laps.classes import Classes
from sglang_laps.core import LapsCore
from sglang_laps.emulation.install import device_of
from sglang_laps.interlude import Interlude
from sglang_laps.ranks import Ranks
from sglang_laps.status import Series
from sglang_laps.support import off_reason, refuse, resolved

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def why_off(scheduler: Scheduler, adder: type) -> str | None:
    """Why LAPS has nothing to do in this scheduler, or None. `adder`: what its batches are built with."""
    reason = off_reason(resolved(scheduler.server_args))
    if reason is None and adder is not PrefillAdder:
        return f"this scheduler builds its batches with {adder.__name__}, not PrefillAdder"
    return reason


class Laps:
    """What a scheduler has of LAPS."""

    def __init__(self, scheduler: Scheduler, config: LapsConfig, stock: Callable[[Any], Any]) -> None:
        """`stock`: the scheduler's own way to the next batch. Ends the process where LAPS cannot be."""
        runner, page = scheduler.tp_worker.model_runner, scheduler.page_size
        chunk: int | None = scheduler.chunked_prefill_size
        if chunk is not None:
            chunk = min(b for b in (chunk, scheduler.max_prefill_tokens) if b is not None and b > 0)
        unit = unit_of(page, scheduler.truncation_align_size)
        device = device_of(scheduler)
        whole = slices.why_not(scheduler, emulated=device is not None)
        self.whole = "slice_ms is 0" if config.slice_ms == 0.0 else whole
        """Why long batches are not run in slices."""
        self.cutter: slices.Cutter | None = None if self.whole else device or slices.Slices(runner)
        """Runs long batches in slices."""
        layers = 0 if self.cutter is None else self.cutter.layers
        try:
            model = saved_model.load(config.profile_path)
            # A fit takes longer than many a slice; its result is taken over by this thread, between two decisions.
            model.submit = ThreadPoolExecutor(1, "laps-fit").submit
            most = scheduler.max_prefill_tokens
            pacer = Pacer(config, chunk_tokens=chunk, batch_tokens=most, unit=unit, layers=layers, model=model)
        except ConfigError as e:
            refuse(e)
        if config.length_threshold != AUTO and pacer.threshold_tokens < int(config.length_threshold):
            logger.warning(
                "LAPS: the length threshold is lowered from %s to %d tokens, what one chunk holds.",
                config.length_threshold,
                pacer.threshold_tokens,
            )

        def cached(req: Any) -> int:
            if req.positional_embed_overrides is not None:
                return 0
            match_kv_cache(req, scheduler.tree_cache)
            return int(req.num_matched_prefix_tokens)

        def priority(req: Any) -> int:
            return int(scheduler.policy.priority_sign * (req.priority or 0))

        self.core = LapsCore(
            pacer,
            Classes(config, pacer.threshold_tokens, cached, time.perf_counter),
            unit=unit,
            page=page,
            priority=priority if scheduler.enable_priority_scheduling else None,
            now=time.perf_counter(),
        )
        ranks = Ranks(scheduler.attn_tp_cpu_group)
        self.builder = Builder(scheduler, self.core, ranks, stock, self.cutter)
        self.interlude = Interlude(scheduler, self.core, self.builder, ranks, self.cutter)
        self.saver = saved_model.Saver(model, config.profile_path if ranks.saves else None)
        self.dp_rank: int = get_parallel().dp_rank or 0
        labels = {"model_name": get_serving().served_model_name, "dp_rank": str(self.dp_rank)}
        tells = scheduler.metrics_reporter.enable_metrics and ranks.leader
        self.series = Series(labels, {} if device is None else device.labels) if tells else None
        """For Prometheus, on one rank."""
        self.synchronous = torch.device(scheduler.device).type == "cpu"
        """A forward pass has ended when its call has: there is no device of its own."""
