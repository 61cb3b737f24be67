"""Receipts of one scheduler: records what the device runs and which batches are held, and makes an account of each
request as its first token leaves. Only on the leading rank, which sends the receipts.

A question about receipts travels inside SGLang's request for the internal state, because every scheduler answers that
request at once, also in the pauses of a batch."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from laps_core.length import LONG, SHORT, ClassName, classify
from laps_core.policy.types import Plan
from laps_core.receipts.account import account
from laps_core.receipts.blocks import NAMED
from laps_core.receipts.extract import extract
from laps_core.receipts.holds import held_long, held_short
from laps_core.receipts.ledger import Ledger, whole_us
from laps_core.receipts.receipt import LONGEST_ID, META_KEY, RECEIPTS_ROUTE, Receipt
from laps_core.receipts.recent import Entry, Query, Recent
from laps_core.receipts.run import Run
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_laps.core import LapsCore
from sglang_laps.flights import Flight, Queues
from sglang_laps.steps import Step
from sglang_laps.telemetry import moments

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

SENT = b""
"""Marks a request whose receipt has been sent."""
_ENCODER = msgspec.json.Encoder()
_PREFIX = "laps-receipts:"


class Receipts:
    """Makes the receipts of one scheduler."""

    def __init__(self, core: LapsCore, dp_rank: int) -> None:
        self._core, self._dp_rank = core, dp_rank
        self.ledger, self.recent = Ledger(), Recent()
        self.no_first_token = False
        """True while the output that is sent cannot hold a first token."""
        self._waiting = 0
        """Number of receipts not sent yet, of requests whose first token leaves later, with the rest of the answer."""

    # -- the device

    def record_start(self, flight: Flight) -> None:
        """Record that a batch starts on the device."""
        predicted_s = self._core.pacer.model.predict(flight.shape) if flight.shape else None
        # All short requests of a batch take the same time, and a receipt names at most NAMED requests.
        left_out = set(islice(flight.short, NAMED, None))
        named = [i for i in range(len(flight.reqs)) if i not in left_out]
        run = flight.run = Run(
            cls=flight.cls,
            rids=tuple([flight.reqs[i].rid[:LONGEST_ID] for i in named]),
            tokens=tuple([flight.shape[i][0] for i in named]),
            more=len(left_out),
            more_tokens=sum([flight.shape[i][0] for i in left_out]),
            cut=None if flight.cut is None else flight.cut.rid[:LONGEST_ID],
            streams=flight.rows,
            depth=len(self._core.under_way),
            layers=flight.layers,
            predicted_us=None if predicted_s is None else whole_us(predicted_s),
            begin_us=whole_us(flight.started or 0.0),
        )
        self.ledger.record_start(run)
        for req in flight.reqs:
            if req.laps_tag is not None:
                req.laps_tag.runs.append(run)

    def _ended(self, flight: Flight, now: float) -> None:
        run, flight.run = flight.run, None
        if run is None:
            return
        end, begin_us = flight.done or now, whole_us(flight.started or now)
        if flight.took_s is None:
            self.ledger.record_end(run, begin_us, whole_us(end))
        else:
            self.ledger.record_end(run, begin_us, begin_us + whole_us(flight.took_s))

    @contextmanager
    def result_of(self, flight: Flight | None) -> Iterator[None]:
        """Process a result in this context, which records it. `flight`: None if the result is of no prefill batch."""
        self.no_first_token = flight is None or not flight.reqs
        if flight is not None:
            self._ended(flight, time.perf_counter())
        yield
        self.no_first_token = False
        if flight is not None:
            self._processed(flight)

    def record_step(self, step: Step) -> None:
        """Record a decode step that occupied the device."""
        decode = self._core.decode
        predicted_us = None if decode is None else whole_us(decode.step_s) or None
        depth = len(self._core.under_way) if step.within else 0
        begin_us = whole_us(step.started)
        run = Run(streams=step.streams, depth=depth, predicted_us=predicted_us, begin_us=begin_us)
        self.ledger.record_end(run, begin_us, whole_us(step.started if step.done is None else step.done))

    def record_decision(self, plan: Plan, queues: Queues, *, paused: bool, joint: bool, built: bool) -> None:
        """Record why requests wait, after the decision of a round was tried."""
        now_us, short, long = whole_us(time.perf_counter()), bool(queues.short), bool(queues.long)
        by_plan = held_short(plan, long=long or paused, joint=joint, built=built)
        self.ledger.record_hold(now_us, SHORT, by_plan if short else None, waits=short)
        by_plan = held_long(plan, lacking=self._core.lacking, joint=joint)
        self.ledger.record_hold(now_us, LONG, by_plan if long else None, waits=long)

    # -- receipts

    @property
    def due(self) -> bool:
        """Return True if the output that is sent now can hold a receipt."""
        return self._waiting > 0 or not self.no_first_token

    def take_receipts(self, reqs: Sequence[Req]) -> list[list[tuple[bytes, bool]]]:
        """Return the receipts of requests whose output is sent now: as JSON, and True if sent with the first token. The
        list of a request without a receipt, or whose receipt was already sent, is empty."""
        now, found = time.perf_counter(), list[list[tuple[bytes, bool]]]()
        for req in reqs:
            made = getattr(req, META_KEY, None)
            if made is None and not req.output_ids and not req.finished():
                found.append([])
                continue
            found.append([(self._make(req, now), True)] if made is None else [(made, False)] if made else [])
            self._waiting -= bool(made)
            setattr(req, META_KEY, SENT)
        return found

    def _processed(self, flight: Flight) -> None:
        """Make receipts of requests that are answered later, in one output. (A prefill server makes no receipt here: it
        answers once the decode server has the KV cache.)"""
        if self._core.decode is None:
            return
        now = time.perf_counter()
        for _, req in flight.served():
            if req is not flight.cut and req.output_ids and getattr(req, META_KEY, None) is None:
                setattr(req, META_KEY, self._make(req, now))
                self._waiting += 1

    def record_abort(self, req: Req) -> None:
        """Record the receipt of an aborted request that has sent no output. A retracted stream has made its receipt."""
        made = getattr(req, META_KEY, None)
        self._waiting -= bool(made)
        setattr(req, META_KEY, SENT)
        if made is None:
            self._make(req, time.perf_counter(), aborted=True)

    def _make(self, req: Req, now: float, *, aborted: bool = False) -> bytes:
        tag = getattr(req, "laps_tag", None)
        aborted = aborted or isinstance(req.finished_reason, FINISH_ABORT)
        cls: ClassName = self._core.classes.class_of(req) if tag else classify(req.seqlen, self._core.classes.threshold)
        m = moments.of(req, cls, now)
        found = account(m, self.ledger)
        cached = int(req.cached_tokens) if m.runs else 0
        text = _ENCODER.encode(
            Receipt(
                rid=m.rid,
                cls=cls,
                arrived_s=time.time() - now + m.arrived_us / 1e6,
                new_tokens=len(req.origin_input_ids) - cached,
                cached_tokens=cached,
                ttft_ms=(m.end_us - m.arrived_us) / 1e3,
                causes={cause: us / 1e3 for cause, us in found.causes_us.items()},
                behind=found.behind,
                left_out=found.left_out,
                dp_rank=self._dp_rank,
                aborted=aborted,
                output_tokens=len(req.output_ids),
                quoted_ms=round(1e3 * tag.quoted.median_s, 3) if tag and tag.quoted else None,
            )
        )
        if not req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            self.recent.add(
                Entry(
                    rid=m.rid,
                    cls=cls,
                    new_tokens=len(req.origin_input_ids) - cached,
                    arrived_us=m.arrived_us,
                    end_us=m.end_us,
                    first_us=m.runs[0].begin_us if m.runs else None,
                    last_us=m.runs[-1].end_us if m.runs else None,
                    transferred_us=m.transferred_us,
                    aborted=aborted,
                    receipt=text,
                )
            )
        return text

    # -- queries

    def answer(self, text: str) -> dict[str, Any]:
        """Answer a ``Query`` (as JSON): ``receipts``, each as JSON, and the number ``kept``; or a ``timeline``, an
        ``Extract`` as msgpack."""
        query = msgspec.json.decode(text, type=Query)
        now = time.perf_counter()
        now_us = whole_us(now)
        if query.timeline:
            begin_us = now_us - whole_us(query.seconds or 0.0)
            epoch_s = time.time() - now
            made = extract(
                self.ledger, self.recent, begin_us=begin_us, end_us=now_us, epoch_s=epoch_s, dp_rank=self._dp_rank
            )
            return {"timeline": msgspec.msgpack.encode(made)}
        found = [entry.receipt for entry in self.recent.find(query, now_us)]
        return {"receipts": found, "kept": len(self.recent)}


class LapsOutputStreamer(SchedulerOutputStreamer):  # type: ignore[misc,unused-ignore]
    """Output streamer that sends the receipt of a request with the first token."""

    has_additional_customized_info: ClassVar[bool] = True
    receipts: Receipts | None = None
    """None = this rank keeps no receipts."""

    def should_build_additional_customized_info(self) -> bool:
        """Return True if this output can have a receipt."""
        return self.receipts is not None and self.receipts.due

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
        """Return the receipts of these requests; an empty dict if no request has one."""
        found = [] if self.receipts is None else self.receipts.take_receipts(reqs)
        return {META_KEY: found} if any(found) else {}


async def ask(manager: Any, query: Query) -> list[Mapping[str, Any]]:
    """Ask the scheduler of each data-parallel rank; return the answers of ``Receipts.answer``, without ranks that keep
    no receipts. `manager`: SGLang's tokenizer manager."""
    manager.auto_create_handle_loop()
    question = GetInternalStateReq(rid=_PREFIX + msgspec.json.encode(query).decode())
    said = await manager.get_internal_state_communicator(question)
    return [answer for one in said if (answer := one.internal_state.get(RECEIPTS_ROUTE))]


def answer_query(question: Any, receipts: Receipts | None) -> Any:
    """Return the answer, empty if it fails, or None if the question is not about receipts."""
    text: str = question.rid or ""
    if not text.startswith(_PREFIX):
        return None
    answer: dict[str, Any] = {}
    try:
        if receipts is not None:
            answer = receipts.answer(text.removeprefix(_PREFIX))
    except Exception:
        # An exception here would end the scheduler, and with it all requests.
        logger.exception("LAPS: a question about receipts failed")
    return GetInternalStateReqOutput(internal_state={RECEIPTS_ROUTE: answer})
