"""What one rank decides for all: whose turn it is, whether to wait, how large the next chunk is.

Everything here hangs on a clock or on measured times, which differ from rank to rank: only the leading rank asks it,
and its ``Plan`` travels to the others as whole numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from sglang_laps.policy.boundary import AutoThreshold
from sglang_laps.policy.catchup import CatchUp
from sglang_laps.policy.config import AUTO, LapsConfig
from sglang_laps.policy.fairness import Launch, LongShare
from sglang_laps.policy.latency import LatencyModel, StepSample
from sglang_laps.policy.length import LONG, SHORT, LengthClass, unit_of, usable_threshold
from sglang_laps.policy.order import Job, Patience, order_named, sorted_by
from sglang_laps.policy.queues import turn
from sglang_laps.policy.room import Room
from sglang_laps.policy.slo import SloLedger
from sglang_laps.policy.window import REASONS, Dispatch, ShortWaiting, Wait, Window

logger = logging.getLogger(__name__)

LOOKAHEAD = 512
"""Waiting requests of a class that are looked at; no short batch is longer than this."""
TOKEN_S = 1e-4
"""Work of a token (seconds) while the latency model is not fitted; only ``order`` uses it."""
Waiting = tuple[int, int, float, "float | None", Hashable]
"""(new tokens, history, arrival, deadline, key) of a waiting request."""
PLAN_NUMBERS = 9 + LOOKAHEAD
"""Length of a Plan in whole numbers."""
SAVE_PERIOD_S = 10.0
"""The latency model is saved no more often than this."""
_CLASSES = (SHORT, LONG)


class Plan(NamedTuple):
    """One round's decision."""

    order: tuple[LengthClass, ...]
    """Classes to try, in turn; empty = run nothing now."""
    picked: tuple[int, ...] = ()
    """Short requests to take first, as indices into the short view; the others follow in their own order."""
    long_first: int = 0
    """The long request to start next, as an index into the long view."""
    chunk_tokens: int = 0
    """Size of the next long chunk; 0 = the server's."""
    threshold: int = 0
    """Longest short request from the next round on (tokens)."""
    waiting: bool = False
    """A short batch is held back."""
    keeps_room: bool = False
    """The long class is owed the batch: where it lacks memory, no short batch goes in its place."""
    reason: str = ""
    """Why a short batch leaves, for the leading rank's books."""
    waited_s: float = 0.0
    late: int = 0
    passed_over: bool = False
    """Somebody older than one of those picked stays behind; for the same books."""

    def numbers(self) -> list[int]:
        """The decision as PLAN_NUMBERS whole numbers."""
        head = [len(self.order), *(_CLASSES.index(c) for c in self.order)][:3]
        head += [0] * (3 - len(head))
        body = [
            *head,
            self.long_first,
            self.chunk_tokens,
            self.threshold,
            int(self.waiting),
            int(self.keeps_room),
            len(self.picked),
            *self.picked,
        ]
        return body + [0] * (PLAN_NUMBERS - len(body))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Plan:
        """Undo ``numbers``."""
        n, first, second, long_first, chunk, threshold, waiting, room, picks = numbers[:9]
        order = tuple(_CLASSES[i] for i in (first, second)[:n])
        return cls(order, tuple(numbers[9 : 9 + picks]), long_first, chunk, threshold, bool(waiting), bool(room))


def _oldest_first(waiting: Sequence[Waiting]) -> Sequence[int]:
    """Indices by arrival."""
    return sorted(range(len(waiting)), key=lambda i: waiting[i][2])


def _passes_over(waiting: Sequence[Waiting], picked: Sequence[int]) -> bool:
    """Whether somebody older than one of the `picked` is not among them."""
    if not picked or len(picked) == len(waiting):
        return False
    youngest_s, taken = max(waiting[i][2] for i in picked), set(picked)
    return any(w[2] < youngest_s and i not in taken for i, w in enumerate(waiting))


class LongWork(NamedTuple):
    """The long request whose chunk would run next."""

    left_tokens: int
    history: int
    since_s: float
    """When it began to wait."""
    new_tokens: int
    """Tokens to prefill when it came."""


class Pacer:
    """The policy of one scheduler, put together. Times are seconds of one clock, lengths tokens."""

    def __init__(
        self, config: LapsConfig, *, threshold: int, chunk_tokens: int | None, page_size: int, align: int | None = None
    ) -> None:
        """`threshold`: longest short request to start with. `chunk_tokens`: one batch's budget; None = unlimited.
        `align`: what SGLang aligns the cuts of a prompt to (its ``truncation_align_size``).

        Raises ConfigError where ``profile_path`` cannot be read, or no chunk of ``long_chunk_tokens`` can be cut.
        """
        self._config = config
        self._chunk = chunk_tokens
        self._budget = chunk_tokens or 1 << 30
        self._page = page_size
        self._unit = unit_of(page_size, align)
        if chunk_tokens is not None:
            config.must_cut(self._unit)
        self.model = LatencyModel.load(config.profile_path) if config.profile_path else LatencyModel()
        self._auto = AutoThreshold(config, threshold) if config.length_threshold == AUTO else None
        self._threshold = threshold
        self.share = LongShare(config.long_share)
        self._catch_up = CatchUp(config.long_share)
        self._room = Room()
        self._spare = 0
        self.slo = SloLedger()
        graphs = (config.graph_batches, config.graph_lengths) if config.graphs else ((), ())
        self.window = Window(config, *graphs)
        self._seen_s: float | None = None
        self._blind = False
        self._order = None if config.order == "fcfs" else order_named(config.order)
        self._short_patience, self._long_patience = Patience(), Patience()
        self._long_next: tuple[Hashable, bool] | None = None
        self._saved_s, self._saved_at = 0.0, 0

    def threshold(self, now: float) -> int:
        """Longest short request (tokens): as configured, or from the latency model."""
        if self._auto is None:
            return self._threshold
        return usable_threshold(self._auto.update(now, self.model), self._chunk, self._page)

    @property
    def threshold_source(self) -> str:
        """ "fixed", or what the automatic threshold comes from."""
        return "fixed" if self._auto is None else self._auto.source

    # -- one round

    def arrived(self, now: float, shorts: int) -> None:
        """`shorts` short requests were found waiting for the first time; call it every round."""
        if shorts and self._config.wait_window_ms:
            self.window.arrived(now, shorts, self._seen_s if self._blind else None)
        self._seen_s, self._blind = now, False

    def nothing_waits(self) -> None:
        """Neither class has work; ``plan`` need not be asked."""
        self.share.long_done()
        self.window.nothing_waits()

    def plan(
        self,
        now: float,
        shorts: Sequence[Waiting],
        longs: Sequence[Waiting],
        *,
        short: bool,
        long: LongWork | None,
        urgent: LengthClass | None = None,
        lacking: bool = False,
    ) -> Plan:
        """Decide. `shorts`, `longs`: those waiting, in order. `lacking`: a long batch lacked memory when last tried."""
        if long is None:
            self.share.long_done()
        if not short:
            self.window.nothing_waits()
        by_arrival = self._short_patience.due
        ranks = _oldest_first(shorts) if by_arrival else self._ranked(now, shorts)
        view = [ShortWaiting(*shorts[i]) for i in ranks]
        owed = self.share.owed()
        spare = not owed and urgent is None and short and long is not None and self._may_catch_up(now, view, long)
        order = turn(short=short, long=long is not None, long_owed=owed or spare, urgent=urgent)
        owed = long is not None and (urgent is LONG or (owed and urgent is None))
        keeps_room = self._room.kept(now, lacking=owed and lacking) and owed
        leaving, waiting = Dispatch((), "idle"), False
        if order and order[0] is SHORT:
            decision = self.window.decide(
                now,
                view,
                token_budget=self._budget,
                long_waiting=long is not None,
                long_chunk_s=self._chunk_s(long),
                predict=self.model.predict,
                late_last=not by_arrival,
            )
            if isinstance(decision, Wait):
                order, waiting = ((LONG,) if decision.run_long and long else ()), True
            else:
                leaving = decision
        elif view and SHORT in order:
            # It goes if the long batch cannot.
            leaving = self.window.leave(
                now, view, token_budget=self._budget, predict=self.model.predict, late_last=not by_arrival
            )
        picked = tuple(ranks[i] for i in leaving.picked)
        long_first = self._first_long(now, longs) if self._order and longs else 0
        chunk = 0
        if long is not None and LONG in order and (view or self._config.ttft_slo_ms):
            chunk = self._long_chunk(now, view, long)
        elif self._chunk and (self._config.long_chunk_tokens or self._full_chunk() != self._chunk):
            chunk = self._full_chunk()
        return Plan(
            order,
            picked,
            long_first,
            chunk,
            self.threshold(now),
            waiting,
            keeps_room,
            leaving.reason,
            leaving.waited_s,
            leaving.late,
            _passes_over(shorts, picked),
        )

    def _first_long(self, now: float, longs: Sequence[Waiting]) -> int:
        """Index of the long request to start next."""
        if self._long_next is not None and all(self._long_next[0] != key for *_, key in longs):
            # Seen as next before, gone now: it has started.
            self._long_patience.served(self._long_next[1])
        oldest = _oldest_first(longs)[0]
        first = oldest if self._long_patience.due else self._ranked(now, longs)[0]
        self._long_next = longs[first][4], longs[oldest][2] < longs[first][2]
        return first

    def _may_catch_up(self, now: float, view: Sequence[ShortWaiting], long: LongWork) -> bool:
        fit = len(view) < LOOKAHEAD and sum(s.tokens for s in view) <= self._budget
        if not self._catch_up.due(now - long.since_s, long.new_tokens, shorts_fit=fit):
            return False
        # Where deadlines leave time for a small part of a chunk only, its fixed cost would be all it does.
        chunk = self._long_chunk(now, view, long)
        return not chunk or 2 * chunk >= min(self._full_chunk(), long.left_tokens)

    def _ranked(self, now: float, waiting: Sequence[Waiting]) -> Sequence[int]:
        """Indices in the configured order."""
        if self._order is None:
            return range(len(waiting))
        jobs = []
        for tokens, history, arrival_s, deadline_s, _ in waiting:
            work_s = self.model.predict([(tokens, history)]) or tokens * TOKEN_S
            jobs.append(Job(arrival_s, deadline_s, work_s, work_s))
        return sorted_by(self._order, jobs, now)

    def _full_chunk(self) -> int:
        tokens = min(self._config.long_chunk_tokens or self._budget, self._budget)
        return max(1, tokens // self._unit) * self._unit

    def _chunk_s(self, long: LongWork | None) -> float | None:
        if long is None:
            return None
        return self.model.predict([(min(self._full_chunk(), long.left_tokens), long.history)])

    def _long_chunk(self, now: float, view: Sequence[ShortWaiting], long: LongWork) -> int:
        if self._chunk is None:
            return 0
        full = self._full_chunk()
        return self.window.long_chunk_tokens(now, view, long.history, full, self._unit, self.model.predict)

    # -- batches

    def launched(self, now: float, cls: LengthClass, requests: int, plan: Plan, *, contended: bool) -> Launch:
        """A batch of `requests` goes to the device."""
        self._blind = True
        if cls is SHORT and self._config.wait_window_ms:
            self.window.dispatched(now, requests, plan.waited_s, plan.reason or REASONS[-2], plan.late)
        self._catch_up.launched(cls)
        if cls is SHORT:
            self._short_patience.served(plan.passed_over)
        launch = self.share.launch(cls, contended=contended)
        self._spare += cls is LONG and contended and not launch.turn
        return launch

    def finished(
        self, launch: Launch, begin: float, end: float, now: float, shape: Sequence[tuple[int, int]], *, stock: bool
    ) -> None:
        """A batch of these (new, history) requests took the device from `begin` to `end`.

        `now`: its clients may know. `stock`: not replayed from a cell.
        """
        self.share.settle(launch, end - begin)
        self._catch_up.measured(launch.cls, sum(new for new, _ in shape), end - begin)
        if stock:
            self.model.observe(StepSample.of(shape, end - begin))
        if launch.cls is SHORT and self._config.wait_window_ms:
            self.window.completed(now, len(shape))

    def save_when_due(self, now: float) -> None:
        """Write the latency model to ``profile_save_path`` if it has learned since; call it when idle."""
        path = self._config.profile_save_path
        if path is None or not self.model.fitted or now - self._saved_s < SAVE_PERIOD_S:
            return
        if self.model.observed == self._saved_at:
            return
        self._saved_s, self._saved_at = now, self.model.observed
        try:
            self.model.save(path)
        except OSError as e:
            logger.warning("LAPS: the latency model could not be saved to %s: %s", path, e.strerror)

    def status(self, now: float) -> dict[str, Any]:
        """What /laps_status says of the decisions (JSON-ready)."""
        return {
            "threshold": {
                "tokens": self.threshold(now),
                "basis": self._config.length_basis,
                "source": self.threshold_source,
            },
            "fairness": {
                "long_share": self.share.share,
                "credit_s": self.share.credit_s,
                "spare_batches": self._spare,
            },
            "window": self.window.status(),
            "latency_model": self.model.status(),
            "slo": {"default_ms": self._config.ttft_slo_ms, "classes": self.slo.status(now)},
        }
