"""How long a prefill step takes: an additive model fitted to measured steps [L s2.1].

One request of L new tokens on H cached ones costs alpha L (L + 2H) + (beta + gamma_w) L + gamma_r H; a step costs the
sum over its requests, plus ``per_request`` for each and ``fixed`` once. beta and gamma_w multiply the same L, so step
totals give their sum only (``linear``): where the paper's L_m needs them apart, the boundary is a knee.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from laps_core.config import ConfigError
from laps_core.latency.boundary import knee
from laps_core.latency.nnls import robust_nnls

VERSION = 1
_KIND = "laps-latency"

MIN_SAMPLES = 32
"""Fewer measured steps than this are not fitted."""
_HELD_OUT_EVERY = 5
_HELD_OUT = 256
_PER_STRATUM = 32
_STRATA = 64
_REFIT_EVERY = 64
_REFIT_AT_MOST_EVERY = 512

Requests = Iterable[tuple[int, int]]
"""(L new tokens, H history tokens) of each request of a step."""


class StepShape(NamedTuple):
    """The sums over a step's requests that its time depends on."""

    attention: int
    """Sum of L (L + 2H) (tokens^2)."""
    tokens: int
    """Sum of L."""
    history: int
    """Sum of H."""
    requests: int

    @classmethod
    def of(cls, requests: Requests) -> StepShape:
        attention = tokens = history = count = 0
        for new, old in requests:
            attention += new * (new + 2 * old)
            tokens += new
            history += old
            count += 1
        return cls(attention, tokens, history, count)


class StepSample(NamedTuple):
    """One measured prefill step."""

    shape: StepShape
    seconds: float

    @classmethod
    def of(cls, requests: Requests, seconds: float) -> StepSample:
        return cls(StepShape.of(requests), seconds)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What a step costs. None is negative."""

    alpha: float
    """s/token^2."""
    linear: float
    """beta + gamma_w, s/token."""
    gamma_r: float
    """s/history token."""
    per_request: float
    """s/request."""
    fixed: float
    """c, s/step."""

    def seconds(self, shape: StepShape) -> float:
        return (
            self.alpha * shape.attention
            + self.linear * shape.tokens
            + self.gamma_r * shape.history
            + self.per_request * shape.requests
            + self.fixed
        )


class FitError(NamedTuple):
    """Relative error on held-out steps (0.1 is 10%)."""

    median: float
    p90: float
    samples: int


class LatencyModel:
    """Learns step times online and predicts them; says "not fitted" until the steps seen can tell the terms apart.

    Every fifth step is held out to measure the error. The others are kept in strata of similar shape, the
    newest 32 of each, so that a thousand small steps do not push out the one large step before them.
    """

    def __init__(self) -> None:
        self._strata: OrderedDict[tuple[int, int, int], deque[StepSample]] = OrderedDict()
        self._held_out: deque[StepSample] = deque(maxlen=_HELD_OUT)
        self._observed = 0
        self._refit_at = MIN_SAMPLES
        self._coefficients: Coefficients | None = None
        self._why_not = "no steps measured"

    @property
    def observed(self) -> int:
        """Steps taken in since the start."""
        return self._observed

    @property
    def fitted(self) -> bool:
        return self._coefficients is not None

    @property
    def coefficients(self) -> Coefficients | None:
        return self._coefficients

    def observe(self, sample: StepSample) -> None:
        """Take in one measured step; refits when enough new ones came in. A time that is not positive is ignored."""
        if not (0.0 < sample.seconds < math.inf and sample.shape.requests > 0):
            return
        self._keep(sample)
        if self._observed >= self._refit_at:
            self.fit()

    def fit(self, samples: Iterable[StepSample] = ()) -> str | None:
        """Take in ``samples`` and fit now. Returns None, or why the data were refused (an earlier fit then stays)."""
        for sample in samples:
            if 0.0 < sample.seconds < math.inf and sample.shape.requests > 0:
                self._keep(sample)
        self._refit_at = self._observed + min(max(_REFIT_EVERY, self._observed // 4), _REFIT_AT_MOST_EVERY)
        kept = [s for stratum in self._strata.values() for s in stratum]
        refused = _degenerate(kept, self._observed)
        if refused:
            self._why_not = refused
            return refused
        table = np.array([(1.0, s.shape.tokens, s.shape.attention, s.shape.history, s.shape.requests) for s in kept])
        try:
            found = robust_nnls(table, np.array([s.seconds for s in kept]))
        except RuntimeError as e:
            self._why_not = str(e)
            return self._why_not
        fixed, linear, alpha, gamma_r, per_request = found.tolist()
        self._coefficients = Coefficients(alpha, linear, gamma_r, per_request, fixed)
        return None

    def predict(self, requests: Requests) -> float | None:
        """Predicted time of a step of these (L, H) requests (seconds); None = not fitted."""
        return self.predict_shape(StepShape.of(requests))

    def predict_shape(self, shape: StepShape) -> float | None:
        """As ``predict``, from the sums."""
        return None if self._coefficients is None else self._coefficients.seconds(shape)

    def boundary(self) -> float | None:
        """New tokens of a prompt without history whose cost has caught up with the step's own; None = not fitted."""
        k = self._coefficients
        return None if k is None else knee(k.alpha, k.linear, k.gamma_r, k.fixed + k.per_request)

    def error(self) -> FitError | None:
        """Error on the latest held-out steps; None = not fitted or none held out."""
        if self._coefficients is None or not self._held_out:
            return None
        model = self._coefficients
        off = np.array([abs(model.seconds(s.shape) - s.seconds) / s.seconds for s in self._held_out])
        return FitError(float(np.median(off)), float(np.quantile(off, 0.9)), len(off))

    def status(self) -> dict[str, Any]:
        """What /laps_status says of the model (seconds and tokens, JSON-ready)."""
        error, edge = self.error(), self.boundary()
        return {
            "fitted": self.fitted,
            "why_not": None if self.fitted else self._why_not,
            "observed": self._observed,
            "samples": sum(map(len, self._strata.values())),
            "coefficients": asdict(self._coefficients) if self._coefficients else None,
            "error": error._asdict() if error else None,
            "boundary_tokens": edge if edge is not None and math.isfinite(edge) else None,
            "boundary_source": None if edge is None else "knee",
        }

    def to_json(self) -> str:
        """The coefficients and the samples behind them, so that a server that loads it keeps shapes it has not seen."""
        body = {
            "kind": _KIND,
            "version": VERSION,
            "coefficients": asdict(self._coefficients) if self._coefficients else None,
            "samples": [_row(s) for stratum in self._strata.values() for s in stratum],
            "held_out": [_row(s) for s in self._held_out],
        }
        return json.dumps(body)

    @classmethod
    def from_json(cls, text: str, where: str = "latency profile") -> LatencyModel:
        """Undo ``to_json``. Raises ConfigError (one line, starting with ``where``) on anything else."""
        try:
            body = json.loads(text)
        except ValueError:
            raise ConfigError(f"{where}: not JSON") from None
        if not isinstance(body, dict) or body.get("kind") != _KIND:
            raise ConfigError(f"{where}: not a saved latency model")
        if body.get("version") != VERSION:
            raise ConfigError(f"{where}: version {body.get('version')!r}, this release reads {VERSION}")
        model = cls()
        try:
            model._coefficients = _coefficients(body["coefficients"])
            for row in body["samples"]:
                model._store(_sample(row))
            model._held_out.extend(_sample(row) for row in body["held_out"])
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"{where}: damaged ({type(e).__name__}: {e})") from None
        return model

    def _keep(self, sample: StepSample) -> None:
        self._observed += 1
        if self._observed % _HELD_OUT_EVERY == 0:
            self._held_out.append(sample)
        else:
            self._store(sample)

    def _store(self, sample: StepSample) -> None:
        shape = sample.shape
        key = (shape.tokens.bit_length(), shape.history.bit_length() // 3, shape.requests.bit_length() // 2)
        stratum = self._strata.get(key)
        if stratum is None:
            if len(self._strata) == _STRATA:
                self._strata.popitem(last=False)
            stratum = self._strata[key] = deque(maxlen=_PER_STRATUM)
        else:
            self._strata.move_to_end(key)
        stratum.append(sample)


def _degenerate(samples: Sequence[StepSample], observed: int) -> str | None:
    """Why these samples cannot be fitted, or None."""
    if observed < MIN_SAMPLES:
        return f"too few steps measured ({observed} of {MIN_SAMPLES})"
    lengths = {s.shape.tokens for s in samples}
    if len(lengths) < 3 or max(lengths) < 2 * min(lengths):
        return f"steps too alike ({min(lengths)} to {max(lengths)} tokens, {len(lengths)} sizes)"
    return None


def _row(sample: StepSample) -> list[float]:
    return [*sample.shape, sample.seconds]


def _sample(row: Sequence[float]) -> StepSample:
    attention, tokens, history, requests, seconds = row
    sample = StepSample(StepShape(int(attention), int(tokens), int(history), int(requests)), float(seconds))
    if min(sample.shape) < 0 or not 0.0 < sample.seconds < math.inf:
        raise ValueError(f"bad sample {list(row)}")
    return sample


def _coefficients(saved: Mapping[str, float] | None) -> Coefficients | None:
    if saved is None:
        return None
    values = {f.name: float(saved[f.name]) for f in fields(Coefficients)}
    if not all(0.0 <= v < math.inf for v in values.values()):
        raise ValueError("a coefficient is negative or not finite")
    return Coefficients(**values)
