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
from sglang_laps.policy.length import LONG, SHORT, LengthClass, usable_threshold
from sglang_laps.policy.order import Job, order_named, sorted_by
from sglang_laps.policy.queues import turn
from sglang_laps.policy.slo import SloLedger
from sglang_laps.policy.window import REASONS, ShortWaiting, Wait, Window

logger = logging.getLogger(__name__)

LOOKAHEAD = 512
"""Waiting requests of a class that are looked at; no short batch is longer than this."""
TOKEN_S = 1e-4
"""Work of a token (seconds) while the latency model is not fitted; only ``order`` uses it."""
Waiting = tuple[int, int, float, "float | None", Hashable]
"""(new tokens, history, arrival, deadline, key) of a waiting request."""
PLAN_NUMBERS = 8 + LOOKAHEAD
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
    reason: str = ""
    """Why a short batch leaves, for the leading rank's books."""
    waited_s: float = 0.0
    late: int = 0
    spare: bool = False
    """A long batch goes beyond the share of its class; for the same books."""

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
            len(self.picked),
            *self.picked,
        ]
        return body + [0] * (PLAN_NUMBERS - len(body))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Plan:
        """Undo ``numbers``."""
        n, first, second, long_first, chunk, threshold, waiting, picks = numbers[:8]
        order = tuple(_CLASSES[i] for i in (first, second)[:n])
        return cls(order, tuple(numbers[8 : 8 + picks]), long_first, chunk, threshold, bool(waiting))


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

    def __init__(self, config: LapsConfig, *, threshold: int, chunk_tokens: int | None, page_size: int) -> None:
        """`threshold`: longest short request to start with. `chunk_tokens`: one batch's budget; None = unlimited.

        Raises ConfigError where ``profile_path`` cannot be read.
        """
        self._config = config
        self._chunk = chunk_tokens
        self._budget = chunk_tokens or 1 << 30
        self._page = page_size
        self.model = LatencyModel.load(config.profile_path) if config.profile_path else LatencyModel()
        self._auto = AutoThreshold(config, threshold) if config.length_threshold == AUTO else None
        self._threshold = threshold
        self.share = LongShare(config.long_share)
        self._catch_up = CatchUp(config.long_share)
        self._spare = 0
        self.slo = SloLedger()
        graphs = (config.graph_batches, config.graph_lengths) if config.graphs else ((), ())
        self.window = Window(config, *graphs)
        self._seen_s: float | None = None
        self._blind = False
        self._order = None if config.order == "fcfs" else order_named(config.order)
        self._saved_s: float | None = None
        self._saved_at = 0

    def threshold(self, now: float) -> int:
        """Longest short request (tokens): as configured, or from the latency model."""
        if self._auto is not None:
            self._auto.update(now, self.model)
        return self.threshold_tokens

    @property
    def threshold_tokens(self) -> int:
        """The threshold in force (tokens)."""
        return self._threshold if self._auto is None else usable_threshold(self._auto.tokens, self._chunk, self._page)

    @property
    def threshold_source(self) -> str:
        """ "fixed", or what the automatic threshold comes from."""
        return "fixed" if self._auto is None else self._auto.source

    # -- one round

    def arrived(self, now: float, shorts: int) -> None:
        """`shorts` short requests were found waiting for the first time; call it every round."""
        if shorts:
            self.window.arrived(now, shorts, self._seen_s if self._blind else None)
        self._seen_s, self._blind = now, False

    def plan(
        self,
        now: float,
        shorts: Sequence[Waiting],
        longs: Sequence[Waiting],
        *,
        short: bool,
        long: LongWork | None,
        urgent: LengthClass | None = None,
    ) -> Plan:
        """Decide. `shorts`, `longs`: those waiting, in order."""
        if long is None:
            self.share.long_done()
        ranks = self._ranked(now, shorts)
        view = [ShortWaiting(*shorts[i]) for i in ranks]
        owed = self.share.owed()
        spare = not owed and urgent is None and short and long is not None and self._may_catch_up(now, view, long)
        order = turn(short=short, long=long is not None, long_owed=owed or spare, urgent=urgent)
        picked: tuple[int, ...] = ()
        reason, waited_s, late, waiting = "idle", 0.0, 0, False
        if order and order[0] is SHORT:
            decision = self.window.decide(
                now,
                view,
                token_budget=self._budget,
                long_waiting=long is not None,
                long_chunk_s=self._chunk_s(long),
                predict=self.model.predict,
            )
            if isinstance(decision, Wait):
                order, waiting = ((LONG,) if decision.run_long and long else ()), True
            else:
                picks, reason, waited_s, late = decision
                picked = tuple(ranks[i] for i in picks)
        long_first = self._ranked(now, longs)[0] if self._order and longs else 0
        chunk = 0
        if long is not None and LONG in order and (view or self._config.ttft_slo_ms):
            chunk = self._long_chunk(now, view, long)
        elif self._config.long_chunk_tokens and self._chunk:
            chunk = min(self._config.long_chunk_tokens, self._chunk)
        return Plan(order, picked, long_first, chunk, self.threshold(now), waiting, reason, waited_s, late, spare)

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
        return min(self._config.long_chunk_tokens or self._budget, self._budget)

    def _chunk_s(self, long: LongWork | None) -> float | None:
        if long is None:
            return None
        return self.model.predict([(min(self._full_chunk(), long.left_tokens), long.history)])

    def _long_chunk(self, now: float, view: Sequence[ShortWaiting], long: LongWork) -> int:
        if self._chunk is None:
            return 0
        full = self._full_chunk()
        return self.window.long_chunk_tokens(now, view, long.history, full, self._page, self.model.predict)

    # -- batches

    def launched(self, now: float, cls: LengthClass, requests: int, plan: Plan, *, contended: bool) -> Launch:
        """A batch of `requests` goes to the device."""
        self._blind = True
        if cls is SHORT:
            self.window.dispatched(now, requests, plan.waited_s, plan.reason or REASONS[-2], plan.late)
        self._catch_up.launched(cls)
        self._spare += plan.spare and cls is LONG
        return self.share.launch(cls, contended=contended, spare=plan.spare)

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
        if launch.cls is SHORT:
            self.window.completed(now, len(shape))

    def save_when_due(self, now: float) -> None:
        """Write the latency model to ``profile_save_path`` if it has learned since; call it when idle."""
        path = self._config.profile_save_path
        if path is None or not self.model.fitted or self.model.observed == self._saved_at:
            return
        if self._saved_s is not None and now - self._saved_s < SAVE_PERIOD_S:
            return
        self._saved_s, self._saved_at = now, self.model.observed
        try:
            self.model.save(path)
        except OSError as e:
            logger.warning("LAPS: the latency model could not be saved to %s: %s", path, e.strerror)

    def status(self, now: float) -> dict[str, Any]:
        """What /laps_status says of the decisions (JSON-ready). Asking changes nothing."""
        return {
            "threshold": {
                "tokens": self.threshold_tokens,
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
