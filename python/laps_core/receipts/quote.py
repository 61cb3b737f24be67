"""Quote: predicted time to first token of a request that arrives now, computed from a small state sent over HTTP."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import msgspec

from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT, ClassName, classify
from laps_core.policy.fairness import SAVED, stretch
from laps_core.receipts.backlog import size_of, work_s
from laps_core.receipts.calibration import START, Factors

QUOTE_ROUTE = "laps_quote"
"""Route of a server: ``GET`` with ``new`` and ``cached`` for a ``Quote``, ``POST`` a list of ``Ask`` for ``Quotes``."""
MOST_ASKED = 1000
"""Most requests of one ``POST``."""
BUSY = 0.95
"""Largest share of the device that predictions assume for work that goes first (0..1)."""
_STRETCHED = (1.05, 1.5, 2.5, 4.0, 8.0)
"""Bounds between the kinds of predictions: predicted time / time of the request alone."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for which a quote is wanted."""

    new: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    """New tokens."""
    cached: Tokens = 0
    """Tokens of the prompt in the server's prefix cache."""


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted time to first token, from a request's arrival at the server's scheduler (milliseconds)."""

    new: int
    cached: int
    cls: ClassName = msgspec.field(name="class")
    ttft_ms: float
    """The median."""
    low_ms: float
    """Low end: one outcome in ten is shorter."""
    high_ms: float
    """High end: one outcome in ten is longer."""
    bound_ms: float | None = None
    """Longest time, while steps take their predicted times and memory is free; None = no such bound."""


class Quotes(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /laps_quote``, in the order of the requests."""

    quotes: list[Quote]
    age_s: float = 0.0
    """Age of the state from which the quotes were computed (seconds)."""


class QuoteState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a scheduler that determines how long a request waits. Times are seconds, lengths tokens."""

    model: Coefficients
    """Latency model."""
    threshold: Tokens
    """Longest short request."""
    whole_prompt: bool = False
    """True if cached tokens also count for the class."""
    least_work: bool = True
    """True if long prompts go by least remaining work, else by arrival."""
    share: float = 0.0
    """Guaranteed share of long time for the oldest prompt (0..1); 0 = no guarantee."""
    chunk: int
    """Most new tokens of a batch."""
    short_batch: int
    """Most new tokens of a short batch while long work waits or runs."""
    layers: int = 1
    """Layers of the model, between which long batches can be paused; 0 = no pauses."""
    gap_s: Seconds = 0.0
    """Least gap between two batches that preempt long work."""
    gap_left_s: Seconds = 0.0
    """Time until the next batch may preempt."""
    runs: bool = False
    """True if short batches can preempt before the gap is over, because there are deadlines."""
    left_s: Seconds = 0.0
    """Time until the device can take another batch."""
    under_way: tuple[Seconds, ...] = ()
    """Device time that each long batch on the device still needs."""
    shorts: int = 0
    """Waiting short requests; below, their tokens and their work."""
    short_tokens: int = 0
    short_s: float = 0.0
    longs: tuple[tuple[int, int, float], ...] = ()
    """Waiting long work: size class (``backlog.size_of``), prompts, seconds."""
    short_rate: float = 0.0
    """Short requests that arrive per second; below, their work per second."""
    short_share: float = 0.0
    long_shares: tuple[tuple[int, float], ...] = ()
    """Size class of long work, and seconds of work that arrive per second."""
    before_s: Seconds = 0.0
    """Time from a request's arrival until it enters the queue."""
    longest: int = 0
    """Tokens of the longest prompt so far."""
    longest_short_s: Seconds = 0.0
    """Longest short batch so far."""
    factors: tuple[tuple[ClassName, int, float, float, float], ...] = ()
    """Class, kind of prediction (-1: all of the class), and the kind's factors for low end, median and high end."""

    @property
    def slices(self) -> bool:
        """True if long batches can be paused."""
        return self.layers > 0

    def kind(self, new: int, cached: int) -> ClassName:
        return classify(new + cached if self.whole_prompt else new, self.threshold)


class Prediction(NamedTuple):
    """Predicted time to first token, before calibration."""

    cls: ClassName
    seconds: float
    kind: int
    """Predictions of one kind have similar errors."""


def predict(state: QuoteState, new: int, cached: int, cls: ClassName | None = None) -> Prediction:
    """Predict the time to first token of a request that arrives now. `cls`: its class; None = by its length."""
    cls = state.kind(new, cached) if cls is None else cls
    model = state.model
    own_s = work_s(model, new, cached, state.chunk) + model.step_s
    total_s = _short_s(state, own_s) if cls == SHORT else _long_s(state, own_s)
    stretched = total_s / max(own_s, 1e-9)
    return Prediction(cls, total_s, sum(stretched > bound for bound in _STRETCHED))


def _short_s(state: QuoteState, own_s: float) -> float:
    step_s = state.model.step_s
    contended = bool(state.under_way or state.longs)
    batches = state.short_tokens // max(1, state.short_batch if contended else state.chunk)
    opens_s = max(state.left_s, state.gap_left_s) if state.slices and contended else state.left_s
    return opens_s + state.short_s + batches * (step_s + state.gap_s * contended) + own_s


def _long_s(state: QuoteState, own_s: float) -> float:
    step_s = state.model.step_s
    size, first_s, later_s, coming = size_of(own_s), 0.0, 0.0, 0.0
    for at, count, seconds in state.longs:
        before = 1.0 if not state.least_work or at < size else 0.5 if at == size else 0.0
        whole_s = seconds + count * step_s
        first_s += before * whole_s
        later_s += (1.0 - before) * whole_s
    first_s += sum(s for s in state.under_way if s < own_s or not (state.slices and state.least_work))
    if state.least_work:
        coming = sum(share * (1.0 if at < size else 0.5) for at, share in state.long_shares if at <= size)
    # While long work runs, batches of short requests are at least a gap apart.
    batches = min(state.short_rate, 1.0 / max(state.gap_s, step_s, 1e-6))
    short = min(state.short_share + batches * step_s, BUSY)
    short_s = state.short_s + step_s * (state.short_tokens // max(1, state.short_batch) + bool(state.shorts))
    total_s = state.left_s + (short_s + first_s + own_s) / (1.0 - min(short + coming, BUSY))
    if state.least_work and state.share > 0.0:
        # Larger prompts that came before this request get the guard's share; later, this request gets it.
        total_s += min(later_s, total_s * state.share / (1.0 - min(state.share, 0.5)))
        guarded_s = (first_s + later_s + own_s) / state.share + short_s
        total_s = min(total_s, state.left_s + guarded_s / (1.0 - short))
    return total_s


def bound_s(state: QuoteState, new: int, cached: int) -> float | None:
    """Return the longest possible time to first token of a long request that arrives now (seconds), from guard and gap
    (see ``policy.fairness``); None for a short request, and if nothing is guaranteed."""
    if state.kind(new, cached) != LONG or state.share <= 0.0 or not state.least_work or state.gap_s <= 0.0:
        return None
    model, longest = state.model, max(state.longest, new + cached)
    chunk = min(state.chunk, longest)
    own_s = work_s(model, new, cached, state.chunk) + model.step_s
    ahead_s = sum(seconds + count * model.step_s for _, count, seconds in state.longs) + sum(state.under_way)
    batch_s = model.work_s(chunk, longest - chunk) + model.step_s
    # While a long batch is paused, smaller prompts overtake it, a gap apart, or with deadlines a step's fixed time.
    overtakes_s = model.work_s(state.short_batch, 0) + model.step_s
    apart_s = model.overhead_s if state.runs else state.gap_s
    if apart_s <= 0.0:
        return None
    long_s = (ahead_s + own_s + batch_s) / min(state.share, apart_s / (apart_s + overtakes_s))
    full_s = model.linear * state.short_batch + state.short_batch * model.per_request / 16 + model.fixed
    short_s = max(state.longest_short_s, full_s)
    rest_s = SAVED * state.gap_s + short_s if state.runs else short_s
    stretched_s = long_s * stretch(state.gap_s, short_s, deadlines=state.runs)
    return state.left_s + stretched_s + rest_s + (SAVED - 1) * short_s


def factors_of(state: QuoteState, cls: ClassName, kind: int) -> Factors:
    """Return the factors of a kind of prediction; if there are none, the factors of its class, or START."""
    found = START
    for its_cls, its_kind, *factors in state.factors:
        if its_cls == cls and its_kind in (kind, -1):
            found = Factors(*factors)
            if its_kind == kind:
                break
    return found


def quote(state: QuoteState, new: int, cached: int) -> Quote:
    """Quote the time to first token of a request with these tokens that arrives now."""
    found = predict(state, new, cached)
    low_ms, middle_ms, high_ms = (
        1e3 * (state.before_s + factor * found.seconds) for factor in factors_of(state, found.cls, found.kind)
    )
    bound = bound_s(state, new, cached)
    bound_ms = None if bound is None else round(1e3 * (state.before_s + bound), 3)
    top_ms = math.inf if bound_ms is None else bound_ms
    low_ms, middle_ms, high_ms = (round(min(ms, top_ms), 3) for ms in (low_ms, middle_ms, high_ms))
    return Quote(
        new=new, cached=cached, cls=found.cls, ttft_ms=middle_ms, low_ms=low_ms, high_ms=high_ms, bound_ms=bound_ms
    )
