"""Data-parallel attention ranks as one machine: in each round the ranks exchange what they could run, and take the same
budget of time. ``laps_core.group`` defines the exchange and the choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from laps_core.config import LapsConfig
from laps_core.group.choice import Choice
from laps_core.group.cost import GroupCost, OwnShape
from laps_core.group.hold import FirstHold
from laps_core.group.learning import GroupModel, GroupSample, proportions
from laps_core.group.menu import ROW, Menu
from laps_core.group.planner import NOTHING, GroupPlanner
from laps_core.group.prompt import Prompt
from laps_core.length import LONG, SHORT, ClassName, whole_units
from laps_core.policy.types import LOOKAHEAD, LongBatch, Plan, Waiting
from sglang.srt.runtime_context import get_parallel

from sglang_laps import messages
from sglang_laps.flights import as_waiting

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_laps.core import LapsCore
    from sglang_laps.flights import Flight, Queues

KEPT = 512
"""Rounds after which LAPS no longer waits for the time of a step: each pause of the step can be a round, and the
overlap loop processes a result one round later."""
UNKNOWN_STEP_TIME = -1
"""Fixed time of a step, as a rank without known step times reports it: then each rank decides for itself."""


def why_not(scheduler: Scheduler) -> str | None:
    """Return why each rank of this server decides for itself, or None. The same on every rank."""
    checks = (
        (get_parallel().attn_dp_size < 2, "there is one data-parallel attention rank"),
        (not scheduler.require_mlp_sync, "its ranks do not run their steps together"),
        (scheduler.enable_priority_scheduling, "with --enable-priority-scheduling each rank orders its own requests"),
    )
    return next((why for hit, why in checks if hit), None)


class Group:
    """One rank's part in the joint plan of all ranks."""

    def __init__(
        self,
        scheduler: Scheduler,
        core: LapsCore,
        known: GroupCost | None,
        config: LapsConfig,
        *,
        chunk: int,
        layers: int | None = None,
        submit: Callable[..., Any] | None = None,
    ) -> None:
        """`known`: step times; None = learn them. `chunk`: most new tokens of a rank's batch. `layers`: see
        ``GroupPlanner``. `submit`: runs a fit of step times in the background."""
        parallel = get_parallel()
        self._core, self._ranks, self._known = core, scheduler.tp_cpu_group, known is not None
        self._scheduler = scheduler
        self._model = GroupModel(known or proportions(parallel.attn_dp_size), guess=known is None)
        self._model.submit = submit
        cost = self._model.cost
        self._planner = GroupPlanner(cost, config, chunk=chunk, page=core.page, unit=core.unit, layers=layers)
        self._decided: tuple[list[Menu], Choice] | None = None
        """Menus and choice of the step that all ranks are about to run."""
        self._leaders = slice(None, None, parallel.attn_tp_size * parallel.attn_cp_size)
        self._rows = torch.empty((parallel.tp_size, ROW), dtype=torch.int64)
        self._hold = FirstHold()
        self._ran = NOTHING
        self._round = 0
        """Number of rounds so far, equal on every rank."""
        self._shapes: dict[int, tuple[OwnShape, ...]] = {}
        self._seconds: dict[int, float] = {}
        self._steps = 0
        self._waited_s = self._steps_s = 0.0
        self._budget_s: float | None = None
        self._rounds_s = self._gathers_s = 0.0
        self._fixed_s = 0.0
        self._preemptions = 0

    def plan(self, now: float, queues: Queues) -> Plan | None:
        """Return the plan of this rank's next batch; None if the rank decides for itself. Every rank must call this in
        every round, because all ranks meet in it."""
        begin = time.perf_counter()
        made = self._plan(now, queues)
        self._rounds_s += time.perf_counter() - begin
        return made

    def _gather(self, row: torch.Tensor) -> list[Menu]:
        """Exchange menus between the ranks; return the menu of each data-parallel rank."""
        begin = time.perf_counter()
        torch.distributed.all_gather_into_tensor(self._rows.view(-1), row, group=self._ranks)
        self._gathers_s += time.perf_counter() - begin
        return [Menu.read(r) for r in self._rows[self._leaders].tolist()]

    def _plan(self, now: float, queues: Queues) -> Plan | None:
        planner, self._decided = self._planner, None
        self._model.settle()
        planner.cost = self._model.cost
        ready = self._model.ready
        begun = len(queues.begun)
        self._hold.update(now, (*queues.short, *queues.long[begun:]), lacking=self._core.lacking)
        # A message reaches the ranks in different pauses, so a rank that is told to stop still takes part in this.
        offers = ready and not messages.stop(self._scheduler._deferred_input_requests)
        prompts, at = self._prompts(queues) if offers else ([], [])
        decode = self._core.decode
        due = (
            {} if decode is None else {"until_decode_s": decode.time_to_next_step_s(now), "owed_s": decode.owed_s(now)}
        )
        menu = planner.menu(now, prompts, self._ran, **due)
        if not ready:
            menu = menu._replace(terms=menu.terms._replace(fixed_us=UNKNOWN_STEP_TIME))
        menus = self._gather(torch.tensor(menu.row(), dtype=torch.int64))
        self._learn(tuple(menu.ran for menu in menus))
        self._ran = NOTHING
        if any(menu.terms.fixed_us == UNKNOWN_STEP_TIME for menu in menus):
            return None
        pacer = self._core.pacer
        pacer.record_arrivals(now, self._core.classes.new_shorts)
        nothing = Plan((), threshold=pacer.threshold_tokens)
        choice = planner.decide(menus)
        if choice is None:
            return nothing
        self._decided = menus, choice
        picks = planner.picks(choice)
        if not picks:
            return nothing
        picked = {i: (queues.short if at[i][0] else queues.long)[at[i][1]] for i, _ in picks}
        first = None if planner.first is None else picked.get(planner.first)
        self._hold.record_picks(picked.values(), first, queues.begun)
        shorts, longs = (tuple(at[i][1] for i, _ in picks if at[i][0] is short) for short in (True, False))
        tokens = sum(whole_units(n, self._core.page) for _, n in picks)
        return nothing._replace(order=(LONG,), picked=shorts, long=LongBatch(longs, tokens), mixed=bool(shorts))

    def start_step(self, *, prefills: bool = True) -> int:
        """Start a step on all ranks; return its number of slices, at least one; 0 if no joint plan was made, or if the
        ranks only decode (`prefills`), because each rank that should prefill lacks memory."""
        slices, decided, self._decided = self._planner.slices, self._decided, None
        if decided is None or not prefills:
            return 0
        menus, choice = decided
        self._steps += 1
        self._waited_s += choice.waits * choice.seconds
        self._steps_s += choice.seconds
        self._budget_s = choice.seconds
        if slices is None:
            return 1
        self._fixed_s = self._planner.step_s(menus)
        self._preemptions += slices.paused
        return slices.start_step(menus, choice)

    def record_slice(self) -> None:
        """Record that a slice of the step that started last has been launched."""
        if self._planner.slices is not None:
            self._planner.slices.record_slice(self._fixed_s)

    @property
    def may_preempt(self) -> bool:
        """Return True if the ranks exchange menus in this pause; the same on every rank."""
        return self._planner.slices is not None and self._planner.slices.may_preempt

    def record_build(self, flight: Flight) -> None:
        """Record the batch that was built from the plan; the next menu reports its shape to all ranks."""
        flight.round = self._round
        self._ran = self._model.cost.shape(flight.shape)

    def record_result(self, flight: Flight) -> None:
        """Record the time of a batch's step, once the result is processed."""
        if flight.round:
            self._seconds[flight.round] = flight.lasted_s

    def status(self) -> dict[str, Any]:
        """Return the group's entry in /laps_status (JSON-ready): steps planned together, steps that preempted another
        step, predicted time of the last step (seconds), predicted share of rank time spent waiting for the slowest
        rank, mean host time of a round outside and inside the gather (milliseconds), and learnt step times (seconds).
        """
        model, rounds = self._model, max(1, self._round)
        return {
            "steps": self._steps,
            "preemptions": self._preemptions,
            "budget_s": self._budget_s,
            "waiting_share": self._waited_s / self._steps_s if self._steps_s else None,
            "round_ms": 1e3 * (self._rounds_s - self._gathers_s) / rounds,
            "gather_ms": 1e3 * self._gathers_s / rounds,
            "fitted": self._known or model.fitted,
            "observed": model.observed,
            "cost": asdict(model.cost),
        }

    def _prompts(self, queues: Queues) -> tuple[list[Prompt], list[tuple[bool, int]]]:
        """Return the prompts that wait on this rank, each with its class (True = short) and its index in that class.

        Only one prompt between two of its chunks is included, because SGLang has one slot for such prompts. Requests
        that stand back for another are left out.
        """
        begun, hold = len(queues.begun), self._hold

        def may_start(req: Any, cls: ClassName) -> bool:
            return cls not in hold.held or req is hold.first

        longs = [as_waiting(r, begun=i < begun) for i, r in enumerate(queues.long)]
        going = min(
            range(begun),
            key=lambda i: longs[i].since_s if self._planner.oldest_first else longs[i].tokens,
            default=None,
        )
        shorts = [(r, as_waiting(r), (True, i)) for i, r in enumerate(queues.short[:LOOKAHEAD]) if may_start(r, SHORT)]
        others = [
            (r, w, (False, i))
            for i, (r, w) in enumerate(zip(queues.long, longs, strict=True))
            if (may_start(r, LONG) if i >= begun else i == going)
        ]
        found = [(self._prompt(r, w), at) for r, w, at in (*shorts, *others)]
        return [p for p, _ in found], [at for _, at in found]

    def _prompt(self, req: Any, w: Waiting) -> Prompt:
        tag, planner = req.laps_tag, self._planner
        known: Prompt | None = tag.prompt
        if known is None or (known.tokens, known.history, known.started) != (w.tokens, w.history, w.started):
            now = Prompt.of(planner.cost, w.tokens, w.history, w.since_s, planner.chunk)
            if known is None:
                planner.count_arrival(now.weight)
            else:
                # The weight stays as it was on arrival.
                now = now._replace(weight=known.weight, started=w.started)
            known = tag.prompt = now
        return known

    def _learn(self, ran: tuple[OwnShape, ...]) -> None:
        """Record the batches that all ranks `ran` last, and learn the time of each step whose batches are known."""
        self._shapes[self._round] = ran
        self._round += 1
        for round_ in self._seconds.keys() & self._shapes.keys():
            self._model.observe(GroupSample(self._shapes.pop(round_), self._seconds.pop(round_)))
        for known in (self._shapes, self._seconds):
            known.pop(self._round - KEPT, None)
