"""What one rank decides for all: which batch is next, whether to wait, whether what runs makes way.

Everything here hangs on a clock or on measured times, which differ from rank to rank: only the leading rank asks it,
and its ``Plan`` travels to the others as whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from laps_core.config import AUTO, LapsConfig
from laps_core.latency.boundary import AutoThreshold
from laps_core.latency.model import LatencyModel, StepSample
from laps_core.length import LONG, SHORT, LengthClass, usable_threshold
from laps_core.scheduling.decision import Dispatch, Wait
from laps_core.scheduling.gap import AIM, Gap
from laps_core.scheduling.guard import Guard
from laps_core.scheduling.order import LEAST_WORK, Patience, Work, order_named, passes_over, sorted_by
from laps_core.scheduling.packing import overtake, pack
from laps_core.scheduling.plan import LOOKAHEAD, Launch, Paused, Plan
from laps_core.scheduling.room import Room
from laps_core.scheduling.sizes import Sizes
from laps_core.scheduling.waiting import Waiting
from laps_core.scheduling.window import Window
from laps_core.slo import SloLedger

OVERTAKE_DEPTH = 2
"""Batches of long work under way at once: one that runs, and one that it has overtaken."""
START_THRESHOLD = 256
"""Where the automatic threshold starts (tokens)."""


class Pacer:
    """The policy of one scheduler, put together. Times are seconds of one clock, lengths tokens.

    Least remaining work first; a guard for the prompt that has waited longest; a gap between preemptions.
    """

    def __init__(
        self,
        config: LapsConfig,
        *,
        chunk_tokens: int | None,
        unit: int = 1,
        layers: int = 0,
        model: LatencyModel | None = None,
    ) -> None:
        """`chunk_tokens`: one batch's budget; None = unlimited. `unit`: a cut prompt ends on a multiple of this
        (tokens). `layers`: of the model; 0 = no slices. `model`: what is known of step times; None = nothing.

        Raises ConfigError where a chunk holds less than one unit.
        """
        self._config = config
        known = LatencyModel() if model is None else model
        self.sizes = Sizes(known, chunk_tokens=chunk_tokens, unit=unit, layers=layers, slice_s=config.slice_ms / 1e3)
        auto = config.length_threshold == AUTO
        self._threshold = usable_threshold(
            START_THRESHOLD if auto else int(config.length_threshold), chunk_tokens, unit
        )
        self._auto = AutoThreshold(self._threshold) if auto else None
        self.gap = Gap(config.preempt_overhead)
        self.guard = Guard(config.guard)
        self.slo = SloLedger()
        self.window = Window(config, config.graph_batches if config.graphs else ())
        self._seen_s: float | None = None
        self._blind = False
        self._order = None if config.order == LEAST_WORK else order_named(config.order)
        self._overtook_s = -math.inf
        self._short_patience, self._long_patience = Patience(), Patience()
        self._room = Room()
        self.preemptions = self.overtakes = 0

    @property
    def model(self) -> LatencyModel:
        """How long a step takes."""
        return self.sizes.model

    @model.setter
    def model(self, model: LatencyModel) -> None:
        self.sizes.model = model

    def threshold(self, now: float) -> int:
        """Longest short request (tokens): as configured, or from the latency model."""
        if self._auto is not None:
            self._auto.update(now, self.model)
        return self.threshold_tokens

    @property
    def threshold_tokens(self) -> int:
        """The threshold in force (tokens)."""
        tokens = self._threshold if self._auto is None else self._auto.tokens
        return usable_threshold(tokens, self.sizes.chunk, self.sizes.unit)

    @property
    def threshold_source(self) -> str:
        """ "fixed", or what the automatic threshold comes from."""
        return "fixed" if self._auto is None else self._auto.source

    # -- one decision

    def arrived(self, now: float, shorts: int) -> None:
        """`shorts` short requests were found waiting for the first time; call it every round."""
        if shorts:
            self.window.arrived(now, shorts, self._seen_s if self._blind else None)
        self._seen_s, self._blind = now, False

    def nothing_waits(self) -> None:
        """Neither class has work; ``plan`` need not be asked."""
        self.guard.none_waits()
        self.window.nothing_waits()

    def plan(
        self,
        now: float,
        shorts: Sequence[Waiting],
        longs: Sequence[Waiting],
        *,
        waiting: int | None = None,
        urgent: LengthClass | None = None,
        paused: Paused | None = None,
        lacking: bool = False,
    ) -> Plan:
        """The next batch. `shorts`, `longs`: those waiting, in order. `waiting`: how many wait in all.

        `urgent`: the class with the strictly higher priority, if the server schedules by it. `paused`: what is paused;
        then an empty plan goes on with it. `lacking`: the first long prompt lacked memory when last tried.
        """
        threshold = self.threshold(now)
        if not shorts:
            self.window.nothing_waits()
        if not longs and paused is None:
            self.guard.none_waits()
            return self._alone(now, shorts, threshold)
        waiting = len(shorts) + len(longs) if waiting is None else waiting
        behind = self.sizes.behind(now, longs)
        # Without slices short requests share the step of a chunk, which is left half of it.
        alone = paused is None and bool(self.sizes.layers)
        budget = self.sizes.budget if alone else self.sizes.preempting_budget(self._threshold)
        plan = self._shorts(now, shorts, budget, threshold)
        opens_s = self.gap.opens_s(self.sizes.fixed_s, behind, full=plan.full)
        due = now >= opens_s or self._pressed(now, [shorts[i] for i in plan.picked], opens_s, behind)
        if urgent is not None:
            due = urgent is SHORT
        owed = lacking and (self.guard.due() or behind > AIM or urgent is LONG)
        if self._room.kept(now, lacking=owed) and owed:
            plan = plan._replace(picked=(), keeps_room=True)
            return plan if paused is not None else self._long_batch(now, longs, waiting, plan, oldest_first=True)
        if paused is None:
            joining = sum(self.sizes.whole_units(shorts[i].tokens) for i in plan.picked)
            plan = self._long_batch(now, longs, waiting, plan, joining=joining, lacking=lacking)
            order = ((LONG,) if longs else ()) + ((SHORT,) if shorts else ())
            return plan._replace(order=order[::-1] if due and not plan.mixed else order)
        if shorts and due:
            return plan._replace(order=(SHORT,))
        may = now >= self._overtook_s + self.gap.seconds(self.sizes.fixed_s, behind) and urgent is not SHORT
        return self._overtaking(longs, waiting, paused, budget, plan) if may else plan

    def _shorts(self, now: float, shorts: Sequence[Waiting], budget: int, threshold: int) -> Plan:
        """The short batch that leaves if one does, long work being there."""
        plan = Plan((), threshold=threshold, contended=True)
        if not shorts:
            return plan
        ranks, late_last = self._short_line(now, shorts)
        view = [shorts[i] for i in ranks]
        said = self.window.leave(now, view, token_budget=budget, predict=self.model.predict, late_last=late_last)
        full = sum(shorts[ranks[i]].tokens for i in said.picked) > budget - threshold
        return self._with(plan, said, ranks, shorts)._replace(full=full)

    def _pressed(self, now: float, picked: Sequence[Waiting], opens_s: float, behind: float) -> bool:
        """Whether a deadline that can be met would be missed if the batch waited for the gap. A step's fixed time is
        left between two preemptions even then."""
        deadlines = [w.deadline_s for w in picked if w.deadline_s is not None]
        if not deadlines or opens_s == math.inf:
            return False
        done_s = now + (self.model.predict([(w.tokens, w.history) for w in picked]) or 0.0)
        earliest_s = opens_s - self.gap.seconds(self.sizes.fixed_s, behind) + (self.sizes.fixed_s or 0.0)
        return now >= earliest_s and any(done_s <= d < done_s + opens_s - now for d in deadlines)

    def _short_line(self, now: float, shorts: Sequence[Waiting]) -> tuple[Sequence[int], bool]:
        """(Indices of short requests in the order to serve them, whether the late ones go last.)"""
        if self._short_patience.due:
            return sorted(range(len(shorts)), key=lambda i: shorts[i].since_s), False
        return self._ranked(now, shorts), True

    def _with(self, plan: Plan, said: Dispatch, ranks: Sequence[int], shorts: Sequence[Waiting]) -> Plan:
        picked = tuple(ranks[i] for i in said.picked)
        return plan._replace(
            picked=picked, reason=said.reason, waited_s=said.waited_s, late=said.late,
            passed_over=passes_over(shorts, picked),
        )  # fmt: skip

    def _alone(self, now: float, shorts: Sequence[Waiting], threshold: int) -> Plan:
        """No long work: AWD decides when the short batch leaves [L s3.1, Alg. 1]."""
        ranks, late_last = self._short_line(now, shorts)
        view = [shorts[i] for i in ranks]
        budget, predict = self.sizes.budget, self.model.predict
        said = self.window.decide(now, view, token_budget=budget, predict=predict, late_last=late_last)
        if isinstance(said, Wait):
            return Plan((), threshold=threshold, waiting=bool(shorts), until_s=said.until_s)
        return self._with(Plan((SHORT,), threshold=threshold), said, ranks, shorts)

    def _long_batch(
        self,
        now: float,
        longs: Sequence[Waiting],
        waiting: int,
        plan: Plan,
        *,
        joining: int = 0,
        lacking: bool = False,
        oldest_first: bool = False,
    ) -> Plan:
        """`joining`: tokens of the short requests that share the step where it cannot be paused. `lacking`: the last
        first prompt found no memory, so the guard stands back once."""
        if not longs:
            return plan
        line = self._line(now, longs)
        oldest = min(range(len(longs)), key=lambda i: longs[i].since_s)
        due = (self.guard.due() if self._order is None else self._long_patience.due) and not lacking
        if oldest_first or (due and longs[oldest].rank == longs[line[0]].rank):
            line.remove(oldest)
            line.insert(0, oldest)
        sizes = self.sizes
        fixed_s = math.inf if sizes.fixed_s is None else sizes.fixed_s
        budget, mixed = sizes.budget // sizes.unit * sizes.unit, False
        if not sizes.layers and sizes.chunk is not None:
            budget, mixed = sizes.timely_chunk(longs[line[0]], joining, self.gap.seconds(sizes.fixed_s)), joining > 0
        packed = pack([longs[i] for i in line], self.sizes.beside_s, budget=budget, fixed_s=fixed_s, waiting=waiting)
        picked = tuple(line[i] for i in packed.picked[:LOOKAHEAD])
        tokens = self.sizes.whole_units(packed.tokens) + (joining if mixed else 0)
        return plan._replace(
            order=(LONG,),
            longs=picked,
            tokens=0 if sizes.chunk is None else min(self.sizes.budget, tokens),
            layers=self.sizes.slice_layers([longs[i] for i in picked], packed.tokens),
            oldest=oldest in picked,
            mixed=mixed,
        )

    def _overtaking(self, longs: Sequence[Waiting], waiting: int, paused: Paused, budget: int, plan: Plan) -> Plan:
        """Never the oldest's turn: it is one that is paused, or will come when that is done."""
        if self._order is not None or self.sizes.fixed_s is None or paused.depth >= OVERTAKE_DEPTH or self.guard.due():
            return plan
        new = [i for i, w in enumerate(longs) if not w.started and w.rank <= paused.rank]
        new.sort(key=lambda i: self.sizes.work_s(longs[i]))
        packed = overtake(
            [longs[i] for i in new],
            self.sizes.beside_s,
            budget=budget,
            left_s=paused.left_s,
            running=paused.requests,
            fixed_s=self.sizes.fixed_s,
            waiting=waiting,
        )
        if not packed.picked:
            return plan
        picked = tuple(new[i] for i in packed.picked[:LOOKAHEAD])
        return plan._replace(
            order=(LONG,),
            longs=picked,
            tokens=self.sizes.whole_units(packed.tokens),
            layers=self.sizes.slice_layers([longs[i] for i in picked], packed.tokens),
        )

    def _line(self, now: float, longs: Sequence[Waiting]) -> list[int]:
        """Indices of `longs` in the order to serve them."""
        if self._order is None:
            return sorted(
                range(len(longs)), key=lambda i: (longs[i].rank, self.sizes.work_s(longs[i]), longs[i].since_s)
            )
        works = [Work(self.sizes.work_s(w), self.sizes.lone_s(w)) for w in longs]
        return sorted(sorted_by(self._order, longs, works, now), key=lambda i: longs[i].rank)

    def _ranked(self, now: float, waiting: Sequence[Waiting]) -> Sequence[int]:
        """Indices of short requests in the configured order; least work leaves them in theirs."""
        if self._order is None:
            return range(len(waiting))
        works = [Work(work_s, work_s) for work_s in map(self.sizes.work_s, waiting)]
        return sorted_by(self._order, waiting, works, now)

    # -- batches

    def launched(
        self, now: float, cls: LengthClass, requests: int, plan: Plan, *, shorts: int = 0, within: bool = False
    ) -> Launch:
        """A batch of `requests` goes to the device. `shorts`: those of a long batch. `within`: another is paused."""
        self._blind = True
        preempts = cls is SHORT and plan.contended
        if cls is SHORT or shorts:
            self.window.dispatched(now, shorts or requests, plan.waited_s, plan.reason or "idle", plan.late)
            self._short_patience.served(plan.passed_over)
        if cls is LONG:
            self._long_patience.served(not plan.oldest)
        if preempts:
            self.gap.sent(now, self.sizes.fixed_s, full=plan.full)
        if within:
            self.preemptions += cls is SHORT
            self.overtakes += cls is LONG
        return Launch(cls, preempts, plan.oldest, requests if cls is SHORT else shorts)

    def finished(
        self,
        launch: Launch,
        begin: float,
        end: float,
        now: float,
        shape: Sequence[tuple[int, int]],
        took_s: float,
        *,
        stock: bool,
        within: bool = False,
    ) -> None:
        """A batch of these (new, history) requests had the device for `took_s`, from `begin` to `end`.

        `now`: its clients may know. `stock`: the latency model may learn from it. `within`: another was paused.
        """
        if launch.preempts:
            self.gap.ran(begin, end)
        if launch.cls is LONG:
            self.guard.ran(took_s, oldest=launch.oldest)
            if within:
                self._overtook_s = end
        if stock:
            self.model.observe(StepSample.of(shape, took_s))
        if launch.shorts:
            self.window.completed(now, launch.shorts)

    def answered(self, now: float, cls: LengthClass, arrival_s: float, slo_s: float | None) -> None:
        """A request of this class that came at `arrival_s` has its first token; `slo_s`: it was given so long."""
        self.slo.record(now, cls.value, now - arrival_s, slo_s)

    def status(self, now: float) -> dict[str, Any]:
        """What /laps_status says of the decisions (JSON-ready). Asking changes nothing."""
        return {
            "threshold": {
                "tokens": self.threshold_tokens,
                "basis": self._config.length_basis,
                "source": self.threshold_source,
            },
            "preemption": {
                "gap_ms": self.gap.seconds(self.sizes.fixed_s) * 1e3,
                "by_short_batches": self.preemptions,
                "by_smaller_prompts": self.overtakes,
            },
            "fairness": {"guard": self.guard.share, "credit_s": self.guard.credit_s},
            "window": self.window.status(),
            "latency_model": self.model.status(),
            "slo": {"default_ms": self._config.ttft_slo_ms, "classes": self.slo.status(now)},
        }
