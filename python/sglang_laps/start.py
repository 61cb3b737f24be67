"""The parts of LAPS in one scheduler, put together when the scheduler starts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from laps_core.config import AUTO, ConfigError, LapsConfig
from laps_core.length import unit_of
from laps_core.paper import pacer as pacer_of
from laps_core.policy.decode import Decode
from laps_core.policy.pacer import Pacer
from laps_plan.profile import Profile
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.runtime_context import get_parallel, get_serving

from sglang_laps import group, saved_model, sessions, whole_view
from sglang_laps.builder import Builder
from sglang_laps.checks import control
from sglang_laps.classes import Classes
from sglang_laps.colocated import Colocated, ahead, count_parked, count_rows, mixes, why_not
from sglang_laps.core import LapsCore
from sglang_laps.late import Late
from sglang_laps.passes import slices
from sglang_laps.passes.cutter import Cutter, device_of
from sglang_laps.pauses import Pauses
from sglang_laps.ranks import Ranks
from sglang_laps.steps import Marks, Steps
from sglang_laps.support import off_reason, refuse, resolved
from sglang_laps.telemetry.quotes import QuotedCore
from sglang_laps.telemetry.receipts import Receipts
from sglang_laps.telemetry.status import Series

if TYPE_CHECKING:
    from laps_core.latency.model import LatencyModel
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def why_off(scheduler: Scheduler, adder: type) -> str | None:
    """Return why LAPS has nothing to do in this scheduler, or None. `adder`: builds the scheduler's batches."""
    reason = off_reason(resolved(scheduler.server_args))
    if reason is None and adder is not PrefillAdder:
        return f"this scheduler builds its batches with {adder.__name__}, not PrefillAdder"
    if reason is None and is_colocated(scheduler):
        return why_not(scheduler)
    return reason


def is_colocated(scheduler: Scheduler) -> bool:
    """Return True if this server prefills and decodes."""
    return bool(scheduler.server_args.disaggregation_mode == DisaggregationMode.NULL.value)


def _cutter(scheduler: Scheduler, config: LapsConfig, alone: str | None) -> Cutter | str:
    """Return what divides long batches into slices, or the reason why nothing does. `alone`: why data-parallel ranks
    plan alone; None = they plan together."""
    if config.slice_ms == 0.0:
        return "slice_ms is 0"
    if is_colocated(scheduler) and alone is None:
        return "ranks that plan together decode between their steps"
    return slices.cutter(scheduler, device_of(scheduler), together=alone is None)


def _pacer(scheduler: Scheduler, config: LapsConfig, unit: int, layers: int, model: LatencyModel) -> Pacer:
    """Return the pacer. `unit`: tokens that a chunk is a multiple of; `layers`: layers of a sliced batch, 0 without
    slices. Raises ConfigError if a knob is invalid on this server."""
    chunk: int | None = scheduler.chunked_prefill_size
    most = scheduler.max_prefill_tokens
    if chunk is not None:
        chunk = min(b for b in (chunk, most) if b is not None and b > 0)
    even = get_parallel().pp_size > 1
    pacer = pacer_of(config, chunk_tokens=chunk, batch_tokens=most, unit=unit, layers=layers, even=even, model=model)
    if config.length_threshold != AUTO and pacer.threshold_tokens < int(config.length_threshold):
        logger.warning(
            "LAPS: the length threshold is lowered from %s to %d tokens, what one chunk holds.",
            config.length_threshold,
            pacer.threshold_tokens,
        )
    return pacer


class Laps:
    """All parts of LAPS in one scheduler."""

    def __init__(self, scheduler: Scheduler, config: LapsConfig, stock: Callable[[Any], Any]) -> None:
        """`stock`: SGLang's method that builds the next batch. Ends the process if a knob or the profile is invalid."""
        page, colocated = scheduler.page_size, is_colocated(scheduler)
        self.ranks = ranks = Ranks(scheduler.attn_cp_cpu_group, scheduler.attn_tp_cpu_group)
        unit = math.lcm(unit_of(page, scheduler.truncation_align_size), max(1, ranks.min_divisible_tokens))
        device = device_of(scheduler)
        alone = group.why_not(scheduler)
        made = _cutter(scheduler, config, alone)
        cutter, why_not = (None, made) if isinstance(made, str) else (made, None)
        operators = 0 if cutter is None else cutter.operators
        self.slices = {"on": why_not is None, "why_not": why_not, "operators": operators}
        """State of slices: whether long batches run in slices, the reason if not, and the number of points of a layer
        at which a pass can be paused."""
        # Ranks that plan together pause together, or not at all.
        layers = 0 if cutter is None or alone is None else cutter.layers
        try:
            model = saved_model.load(config.profile_path)
            # A fit takes longer than many slices; this thread takes over the result between two decisions.
            fits = ThreadPoolExecutor(1, "laps-fit").submit
            model.submit = fits
            pacer = _pacer(scheduler, config, unit, layers, model)
        except ConfigError as e:
            refuse(e)

        def cached(req: Any) -> int:
            if req.positional_embed_overrides is not None:
                return 0
            if (kept := sessions.kept_tokens(scheduler.tree_cache, req)) is not None:
                return kept
            # With the limit of the start: a model with states finds only prefixes of some lengths.
            match_kv_cache(req, scheduler.tree_cache, max_prefix_len=req._compute_max_prefix_len(req.seqlen))
            return int(req.num_matched_prefix_tokens)

        def priority(req: Any) -> int:
            return int(scheduler.policy.priority_sign * (req.priority or 0))

        by_priority: bool = scheduler.enable_priority_scheduling
        parts: dict[str, Any] = {"unit": unit, "page": page, "priority": priority if by_priority else None}
        parts["decode"] = Decode(config.tbt_ms) if colocated else None
        classes = Classes(config, pacer.threshold_tokens, cached, time.perf_counter)
        self.core: LapsCore
        if ranks.leader:
            guaranteed = not by_priority and alone is not None
            self.core = QuotedCore(config, pacer, classes, guaranteed=guaranteed, **parts)
        else:
            self.core = LapsCore(pacer, classes, now=time.perf_counter(), **parts)
        control.Profiles(scheduler, self.core)
        self.synchronous = torch.device(scheduler.device).type == "cpu" if device is None else device.waits
        """True if a forward pass has ended when its call returns: no device runs behind the host."""
        stream = scheduler.forward_stream if scheduler.enable_overlap else None
        self.marks = None if self.synchronous else Marks(scheduler.device_module, stream)
        """Events that measure times on the device; None if ``synchronous``."""
        overlaps = scheduler.enable_overlap and not self.synchronous and ranks.stages == 1
        self.late = Late(scheduler, self.core, ranks) if overlaps and alone else None
        """Puts off decisions in the overlap loop; None elsewhere."""
        self.group = None if alone else self._group(scheduler, config, pacer, fits, cutter)
        """The common plan of data-parallel ranks; None if each rank plans alone."""
        self.together = {"on": alone is None, "why_not": alone}
        if colocated:
            scheduler.model_config.laps_colocated = True  # see penalties
        self.dp_rank: int = get_parallel().dp_rank or 0
        self.receipts = Receipts(self.core, self.dp_rank) if config.receipts and ranks.leader else None
        """Makes receipts; None on ranks that send no answers, and if no receipts are kept."""
        beside: dict[str, Any] = {"receipts": self.receipts}
        if colocated:
            beside |= {"ahead": partial(ahead, scheduler, self.core), "mixes": mixes(scheduler)}
        self.builder = Builder(scheduler, self.core, ranks, stock, self.group, **beside)
        whole_view.show(scheduler, self.core, self.builder)
        if colocated:
            count_parked(scheduler, self.core)
            count_rows(scheduler, self.core, self.builder)
        kind = Colocated if colocated else Pauses
        self.pauses = kind(
            scheduler, self.core, self.builder, ranks, cutter, synchronous=self.synchronous, group=self.group
        )
        self.colocated = self.pauses if isinstance(self.pauses, Colocated) else None
        """The pauses of a server that also decodes; None if this server only prefills."""
        record_step = (lambda _: None) if self.receipts is None else self.receipts.record_step
        self.steps = Steps(self.core, self.marks, record_step, self.group) if colocated else None
        """Measures decode steps; None if this server only prefills."""
        self.saver = saved_model.Saver(model, config.profile_path if ranks.saves else None)
        labels = {"model_name": get_serving().served_model_name, "dp_rank": str(self.dp_rank)}
        labels |= resolved(scheduler.server_args).extra_metric_labels or {}
        tells = scheduler.metrics_reporter.enable_metrics and ranks.leader
        without = [*(() if colocated else ("decode",)), *(() if self.group else ("group",))]
        self.series = Series(labels, {} if device is None else device.labels, without=without) if tells else None
        """Prometheus series, on the leading rank; None if metrics are off."""

    def _group(
        self, scheduler: Scheduler, config: LapsConfig, pacer: Pacer, fits: Any, cutter: Cutter | None
    ) -> group.Group:
        device = Profile.find(config.profile_path) if config.profile_path else None
        known = None
        if device is not None and device.group is not None:
            try:
                known = device.with_ranks(get_parallel().attn_dp_size).group_with_host
            except ValueError as e:
                refuse(f"--laps-config: {e}")
        chunk, layers = pacer.sizes.budget, None if cutter is None else cutter.layers
        return group.Group(scheduler, self.core, known, config, chunk=chunk, layers=layers, submit=fits)
