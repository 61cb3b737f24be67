"""Decisions of the leading rank for all ranks: the next batch, holds, and preemption of the running batch.

All decisions depend on a clock or on measured times, which differ between ranks. So only the leading rank decides, and
its ``Plan`` goes to the other ranks as whole numbers.

Preemption is decided at the end of ``Pacer.plan``. ``fairness.Gap`` gives the time from which short requests may
preempt. ``preemption`` decides if that pays, or if a smaller long prompt preempts (overtakes). Data-parallel attention
uses ``group.slices``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from laps_core.busy import BusyMeter
from laps_core.config import LapsConfig
from laps_core.latency.boundary import Threshold
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import StepSample
from laps_core.length import LONG, SHORT, ClassName, usable_threshold
from laps_core.policy.arrivals import Rate
from laps_core.policy.batching import LongBatches
from laps_core.policy.fairness import Gap, Guard
from laps_core.policy.hold import Window
from laps_core.policy.memory import MemoryHold
from laps_core.policy.order import short_turns
from laps_core.policy.predict import BATCH_TOKENS, Sizes, without_standstill
from laps_core.policy.preemption import Preemption
from laps_core.policy.types import Account, DecodeStep, Paused, Plan, Running, Waiting
from laps_core.slo import SloLedger

SOONER = 0.1
"""Share of its predicted time by which a batch can end early."""


class Pacer:
    """Complete policy of one scheduler. Times are seconds of one clock, lengths are tokens.

    Least remaining work first; a guard for the prompt that has waited longest; a gap between preemptions.
    """

    def __init__(
        self,
        config: LapsConfig,
        *,
        chunk_tokens: int | None,
        batch_tokens: int = BATCH_TOKENS,
        unit: int = 1,
        layers: int = 0,
        even: bool = False,
        model: LatencyModel | None = None,
    ) -> None:
        """`chunk_tokens`, `batch_tokens`, `even`: see ``Sizes``. `unit`: a cut prompt ends on a multiple of this
        (tokens). `layers`: layers of the model; 0: no slices. `model`: initial latency model; None: not fitted yet.

        Raises ConfigError if a chunk holds less than one unit.
        """
        self._config = config
        self.model = LatencyModel() if model is None else model
        """Latency model of the steps."""
        slice_s = config.slice_ms / 1e3
        sizes = self.sizes = Sizes(
            self.model, chunk_tokens=chunk_tokens, unit=unit, layers=layers, slice_s=slice_s,
            batch_tokens=batch_tokens, even=even,
        )  # fmt: skip
        configured = config.length_threshold
        self._threshold = Threshold(None if isinstance(configured, str) else configured)
        self.gap = Gap(config.preempt_overhead, sizes)
        self.guard = Guard(config.guard)
        self.window = Window(config, self.model.predict)
        self.short_rate = Rate()
        self.longs = LongBatches(config.order, sizes, self.gap, self.guard)
        self._preemption = Preemption(sizes, self.gap, self.longs)
        self._memory_hold = MemoryHold()
        self._seen_s: float | None = None
        self._blind = False
        self._last_end_s = self._left_when_overtaken_s = -math.inf
        self.slo, self.busy = SloLedger(), BusyMeter()
        self.preemptions = self.overtakes = self.shared = 0

    @property
    def threshold_tokens(self) -> int:
        """Longest short request (tokens): as configured, or from the latency model."""
        return usable_threshold(self._threshold.tokens, self.sizes.chunk, self.sizes.unit)

    # -- one decision

    def record_arrivals(self, now: float, shorts: int, *, busy: bool = False) -> None:
        """Record that `shorts` short requests were first seen; call every round. `busy`: a batch runs, and the
        scheduler looks again only after its result, so that arrival times in between are unknown."""
        self.model.settle()
        self.short_rate.record(now, shorts)
        if shorts:
            self.window.record_arrivals(now, shorts, self._seen_s if self._blind else None)
        self._seen_s, self._blind = now, busy

    def record_empty_queue(self) -> None:
        """Reset guard and window because no class has work; ``plan`` need not be called."""
        self.guard.reset()
        self.window.record_empty_queue()

    def plan(
        self,
        now: float,
        shorts: Sequence[Waiting],
        longs: Sequence[Waiting],
        *,
        urgent: ClassName | None = None,
        paused: Paused | None = None,
        lacking: bool = False,
        drains: ClassName | None = SHORT,
        free_s: float = -math.inf,
    ) -> Plan:
        """Return the plan of the next batch. `shorts`, `longs`: waiting requests of each class, in order.

        `urgent`: class of strictly higher priority, if the server schedules by priority. `paused`: batch that the
        classes in ``Plan.order`` preempt, and that resumes if the order is empty. `lacking`: the first long prompt
        lacked memory when last tried. `drains`: class of the work under way that will free memory, LONG if both classes
        will; None if no work will. `free_s`: time at which the device finishes the running work.
        """
        self._threshold.update(now, self.model.boundary)
        if not shorts:
            self.window.record_empty_queue()
        if not longs and paused is None:
            self.guard.reset()
            self._memory_hold.choose_held_classes(now, lacking=False, drains=None)
            return self._shorts(now, shorts, self.sizes.budget, free_s=free_s)
        gap, preemption, known = self.gap, self._preemption, self.sizes.fixed_s is not None
        # Without slices short requests share the step of a chunk; at least half of the step is left for the chunk.
        starts = paused is None and bool(self.sizes.layers)
        budget = self.sizes.budget if starts else self.sizes.preempting_budget(self.threshold_tokens)
        plan = self._shorts(now, shorts, budget, contended=True)
        # A full batch, or one of higher priority, is worth a step, however many long prompts pay for the step.
        many = urgent != SHORT and len(plan.picked) == len(shorts)
        gap.set_paying_longs(len(longs) + (paused is not None) if many else 0)
        all_waiting, picked, opens_at = (*shorts, *longs), [shorts[i] for i in plan.picked], gap.opens_at()
        # Only deadlines depend on the time at which the device gets to a batch that is decided on now.
        starts_at = max(now, free_s) if paused is None else now + paused.slice_s
        pressed = now >= gap.opens_for_deadline_at() and preemption.would_miss_deadline(
            starts_at, picked, opens_at - now
        )
        due = urgent != LONG and (now >= opens_at or pressed or (urgent == SHORT and paused is None))
        held_back = self._memory_hold.choose_held_classes(now, lacking=lacking, drains=drains)
        if SHORT in held_back:
            plan = plan._replace(picked=(), held="memory")
            if paused is not None:
                return plan
            return self.longs.add_next(plan, starts_at, longs, len(all_waiting), oldest_first=True)
        by_worth = urgent is None and not pressed and known
        if paused is not None:
            if picked and due and (not by_worth or preemption.should_preempt(starts_at, picked, paused, all_waiting)):
                return plan._replace(order=(SHORT,))
            if held_back or urgent == SHORT:
                return plan
            # Negative if another batch is paused than the one that was overtaken.
            moved_s = self._left_when_overtaken_s - paused.left_s
            plan = preemption.add_overtaking(
                starts_at, longs, paused, budget, plan, all_waiting, moved_s=math.inf if moved_s < 0.0 else moved_s
            )
            self._left_when_overtaken_s = paused.left_s if plan.order else self._left_when_overtaken_s
            return plan
        # Joining short requests would take the memory first.
        joining = () if lacking else picked
        # A prompt that lacked memory does not lead again at once, unless other requests stand back for it.
        oldest_first = True if held_back else False if lacking else None
        plan = self.longs.add_next(plan, starts_at, longs, len(all_waiting), joining=joining, oldest_first=oldest_first)
        if starts and joining and (by_worth or urgent == LONG):
            plan = preemption.share(now, picked, longs, plan, all_waiting, starts_at=starts_at, behind=urgent == LONG)
        if not shorts:
            return plan
        return plan._replace(order=(SHORT, LONG) if due and not plan.mixed and not held_back else (LONG, SHORT))

    def _shorts(
        self, now: float, shorts: Sequence[Waiting], budget: int, *, contended: bool = False, free_s: float = -math.inf
    ) -> Plan:
        """Return the short batch that could leave; AWD may hold it unless `contended` (LAPS, s3.1, Alg. 1)."""
        if not shorts:
            return Plan((), threshold=self.threshold_tokens, account=Account(contended=contended))
        turns = short_turns(self.longs.order, shorts, self.sizes, now, budget, self.guard.share)
        plan = self.window.decide(
            now, [shorts[i] for i in turns],
            token_budget=budget, contended=contended, free_s=free_s, lead_s=self.sizes.lead_s,
        )  # fmt: skip
        account, picked = plan.account._replace(contended=contended), tuple(turns[i] for i in plan.picked)
        order = () if contended else plan.order
        return plan._replace(order=order, picked=picked, threshold=self.threshold_tokens, account=account)

    # -- batches

    def record_launch(self, now: float, batch: Running, plan: Plan) -> None:
        """Record that a batch of the plan goes to the device."""
        self._blind = True
        account = batch.account = plan.account
        if batch.short:
            self.window.record_dispatch(now, len(batch.short), account.waited_s, account.reason or "idle", account.late)
        if batch.cls == LONG:
            self.shared += bool(batch.short)
        if batch.preempts:
            self.gap.record_launch(now)
        if batch.within:
            self.preemptions += batch.cls == SHORT
            self.overtakes += batch.cls == LONG

    def record_result(self, batch: Running, below: Running | None, now: float) -> float:
        """Record the result of a batch. Return its device time, without a standstill of the host (seconds).

        `below`: the batch paused for this batch.
        """
        end = batch.done or now
        # With two batches in flight the second starts on the device when the first ends.
        sent = end if batch.started is None else batch.started
        begin = sent if batch.within else max(sent, self._last_end_s)
        end = end if batch.took_s is None else begin + batch.took_s
        if not batch.within:
            self._last_end_s = end
            self.busy.add(begin, end)
        elif below is not None:
            # A batch paused further below gets this time, too, when `below` ends.
            below.paused_s += end - begin
        took_s = max(0.0, end - begin - batch.paused_s)
        if batch.preempts:
            self.gap.record_end(begin, end)
        measured_s, took_s = took_s, without_standstill(took_s, self.model.predict(batch.shape))
        rows_s = min(batch.rows_s, took_s)
        if rows_s:
            self.guard.record_delay(rows_s)
        if batch.cls == LONG:
            self.guard.record_batch(took_s - rows_s, oldest=batch.account.oldest, late=batch.account.oldest_late)
        if batch.stock:
            self.model.observe(StepSample.of(batch.shape, measured_s))
        if batch.short:
            self.window.record_completion(now, len(batch.short))
        return took_s

    def free_s(self, now: float, running: Iterable[Running], step: DecodeStep | None = None) -> float:
        """Return the predicted time at which the device has run these batches and the decode step, one after the other
        (seconds)."""
        end = self._last_end_s
        for batch in running:
            begin = max(end, now if batch.started is None else batch.started)
            end = begin + batch.paused_s + (self.model.predict(batch.shape) or 0.0)
        if step is not None:
            end = max(end, step.launched_s) + step.took_s
        return max(now, end)

    def decision_time_s(self, now: float, running: Sequence[Running], step: DecodeStep | None = None) -> float:
        """Return the time until which to put off the decision on the next batch: as late as these batches and the
        decode step keep the device busy, so that new arrivals join. `now` while launch time or step time is unknown."""
        took_s = step.took_s if step else self.model.predict(running[-1].shape) if running else None
        if not took_s or not self.sizes.lead_s:
            return now
        return max(now, self.free_s(now, running, step) - self.sizes.lead_s - SOONER * took_s)

    def record_decode_step(self, begin: float, end: float, below: Running | None) -> None:
        """Record a decode step on the device, in a pause of `below` or, if None, between two batches."""
        if below is not None:
            below.paused_s += end - begin
        else:
            self._last_end_s = end
            self.busy.add(begin, end)
        self.guard.record_delay(end - begin)

    def status(self, now: float) -> dict[str, Any]:
        """Return the entries on decisions in /laps_status (JSON-ready). Change nothing."""
        return {
            "threshold": {
                "tokens": self.threshold_tokens,
                "basis": self._config.length_basis,
                "source": self._threshold.source,
            },
            "preemption": {
                "gap_ms": self.gap.least_s * 1e3,
                "by_short_batches": self.preemptions,
                "by_smaller_prompts": self.overtakes,
                "steps_shared": self.shared,
            },
            "fairness": {"guard": self.guard.share, "credit_s": self.guard.credit_s},
            "window": self.window.status(),
            "latency_model": self.model.status(),
            "slo": {"default_ms": self._config.ttft_slo_ms, "classes": self.slo.status(now)},
        }
