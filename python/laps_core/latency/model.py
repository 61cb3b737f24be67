"""Latency model of prefill steps, learned online from measured steps."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from laps_core.config import ConfigError
from laps_core.latency.fits import Fitted, Learned, clearly_better, mean_error, scramble
from laps_core.latency.fitting import fit
from laps_core.latency.step import Coefficients, Count, Requests, StepSample, StepShape
from laps_core.latency.strata import Strata

VERSION = 1
_KIND = "laps-latency"

MIN_SAMPLES = 32
"""Least number of measured steps for a fit."""
_HELD_OUT_EVERY = 5
_HELD_OUT = 256
_REFIT_EVERY = 64
_REFIT_AT_MOST_EVERY = 512
_JUDGED, _RECENT = 1024, 512
"""The last ``_RECENT`` steps outdate all older ones if a fit to them is clearly better on the steps held out of the
last ``_JUDGED``. These are more, so that most of them agree only when no recent step is from before a change."""
_JUDGES = 32
"""Least number of these held-out steps."""

_Row = tuple[Count, Count, Count, Count, Annotated[float, Meta(gt=0.0, le=sys.float_info.max)]]
"""StepSample in a file."""


class _Saved(msgspec.Struct, kw_only=True):
    """Saved model in a file."""

    kind: str = _KIND
    version: int = VERSION
    coefficients: Coefficients | None
    samples: list[_Row]
    held_out: list[_Row]


class LatencyModel(Fitted[Learned[Coefficients | str]]):
    """Learns step times online and predicts them; "not fitted" until the measured steps can separate the terms.

    One of every five steps, without rhythm, is held out to measure the error. Other steps are kept in strata of similar
    shape, the newest 32 in each stratum, so that a thousand small steps do not displace one earlier large step.
    If the device has become slower or faster, or a file came from another one, all older steps are dropped.
    """

    def __init__(self, coefficients: Coefficients | None = None) -> None:
        """``coefficients``: initial model of the server, if known."""
        super().__init__()
        self.coefficients = coefficients
        self.observed = 0
        """Valid steps observed since the start."""
        self._strata: Strata[StepSample] = Strata()
        self._held_out: deque[StepSample] = deque(maxlen=_HELD_OUT)
        self._hold = 0
        """Number of the step of this block that is held out."""
        self._refit_at = MIN_SAMPLES
        self._why_not: str | None = "no steps measured"

    @property
    def fitted(self) -> bool:
        return self.coefficients is not None

    def observe(self, sample: StepSample) -> None:
        """Add one measured step, and refit after enough new steps. Ignores a step without requests, or with a time that
        is not positive or not finite."""
        self.settle()
        if not (0.0 < sample.seconds < math.inf and sample.shape.requests > 0):
            return
        self.observed += 1
        sample = sample._replace(number=self.observed)
        if self.observed % _HELD_OUT_EVERY == 1:
            # Not every fifth: a rhythm of the traffic could hide one kind of step from the fit.
            self._hold = self.observed + scramble(self.observed) % _HELD_OUT_EVERY
        if self.observed == self._hold:
            self._held_out.append(sample)
        else:
            self._store(sample)
        if self.observed < MIN_SAMPLES:
            self._why_not = f"too few steps measured ({self.observed} of {MIN_SAMPLES})"
        elif self.observed >= self._refit_at:
            self.fit()

    def fit(self) -> None:
        """Start a fit. If the steps do not allow one, the earlier fit stays, and the status gives the reason."""
        self._refit_at = self.observed + min(max(_REFIT_EVERY, self.observed // 4), _REFIT_AT_MOST_EVERY)
        self._make(learn, self._strata.samples(), list(self._held_out), self.observed)

    def _take(self, learned: Learned[Coefficients | str]) -> None:
        found, outdated = learned
        if outdated is not None:
            self._strata.keep(lambda s: s.number > outdated)
            self._held_out = deque((s for s in self._held_out if s.number > outdated), maxlen=_HELD_OUT)
        if isinstance(found, str):
            self._why_not = found
        else:
            self._why_not, self.coefficients = None, found

    def predict(self, requests: Requests) -> float | None:
        """Return the predicted time of a step of these (L, H) requests (seconds); None = not fitted."""
        return None if self.coefficients is None else self.coefficients.seconds(StepShape.of(requests))

    def boundary(self) -> float | None:
        """Return the tokens of a prompt without history that take as long as an empty step; None = not fitted."""
        return None if self.coefficients is None else self.coefficients.boundary()

    def error(self) -> dict[str, float] | None:
        """Return median and P90 of the relative error (0.1 is 10%) on the latest held-out steps, and the number of
        these steps ("samples"); None = not fitted, or no step held out."""
        model = self.coefficients
        if model is None or not self._held_out:
            return None
        off = errors(model, self._held_out)
        return {"median": float(np.median(off)), "p90": float(np.quantile(off, 0.9)), "samples": len(off)}

    def status(self) -> dict[str, Any]:
        """Return the model's part of /laps_status (seconds and tokens, JSON-ready)."""
        edge = self.boundary()
        return {
            "fitted": self.fitted,
            "why_not": None if self.fitted else self._why_not,
            "observed": self.observed,
            "samples": len(self._strata.samples()),
            "coefficients": asdict(self.coefficients) if self.coefficients else None,
            "error": self.error(),
            "boundary_tokens": edge if edge is not None and math.isfinite(edge) else None,
            "boundary_source": None if edge is None else "knee",
        }

    def to_json(self) -> str:
        """Return the coefficients and samples as JSON. A server that loads the samples fits with shapes that it has not
        run itself."""
        kept = self._strata.samples(), self._held_out
        samples, held_out = ([(*s.shape, s.seconds) for s in those] for those in kept)
        body = _Saved(coefficients=self.coefficients, samples=samples, held_out=held_out)
        return msgspec.json.encode(body).decode()

    @classmethod
    def from_json(cls, text: str, where: str) -> LatencyModel:
        """Read a model from the text of ``to_json``. Raises ConfigError (one line, starting with ``where``) on any
        other text."""
        try:
            body = msgspec.json.decode(text)
            if not isinstance(body, dict) or body.get("kind") != _KIND:
                raise ConfigError(f"{where}: not a saved latency model")
            if body.get("version") != VERSION:
                raise ConfigError(f"{where}: version {body.get('version')!r}, this release reads {VERSION}")
            saved = msgspec.convert(body, _Saved)
        except msgspec.ValidationError as e:
            raise ConfigError(f"{where}: damaged ({e})") from None
        except (msgspec.DecodeError, RecursionError):
            raise ConfigError(f"{where}: not JSON") from None
        model = cls(saved.coefficients)
        for *shape, seconds in saved.samples:
            model._store(StepSample(StepShape(*shape), seconds))
        model._held_out.extend(StepSample(StepShape(*shape), seconds) for *shape, seconds in saved.held_out)
        return model

    def _store(self, sample: StepSample) -> None:
        shape = sample.shape
        key = (shape.tokens.bit_length(), shape.history.bit_length() // 3, shape.requests.bit_length() // 2)
        self._strata.add(key, sample)


def errors(model: Coefficients, samples: Iterable[StepSample]) -> npt.NDArray[np.float64]:
    """Return the relative error of each predicted time."""
    return np.array([abs(model.seconds(s.shape) - s.seconds) / s.seconds for s in samples])


def learn(samples: Sequence[StepSample], held_out: Sequence[StepSample], newest: int) -> Learned[Coefficients | str]:
    """Return the coefficients fitted to these steps, or the reason why no fit is possible; recent steps alone count if
    they outdate the others. ``newest``: number of the latest step."""
    found, judges = _fit(samples), [s for s in held_out if s.number > max(0, newest - _JUDGED)]
    if isinstance(found, str) or len(judges) < _JUDGES:
        return Learned(found)
    outdated = max(0, newest - _RECENT)

    def again() -> Coefficients | None:
        fitted = _fit([s for s in samples if s.number > outdated])
        return None if isinstance(fitted, str) else fitted

    newer = clearly_better(found, again, lambda model: mean_error(errors(model, judges)))
    return Learned(found) if newer is None else Learned(newer, outdated)


def _fit(samples: Sequence[StepSample]) -> Coefficients | str:
    """Return the coefficients fitted to these steps, or the reason why no fit is possible."""
    lengths = {s.shape.tokens for s in samples}
    if len(lengths) < 3 or max(lengths) < 2 * min(lengths):
        return f"steps too alike ({min(lengths)} to {max(lengths)} tokens, {len(lengths)} sizes)"
    try:
        return fit(samples)
    except RuntimeError as e:
        return str(e)
