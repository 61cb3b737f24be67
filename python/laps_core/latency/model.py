"""Latency model of prefill steps, learned online from measured steps."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from laps_core.config import ConfigError
from laps_core.latency.fits import Fitted
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

_Row = tuple[Count, Count, Count, Count, Annotated[float, Meta(gt=0.0, le=sys.float_info.max)]]
"""StepSample in a file."""


class _Saved(msgspec.Struct, kw_only=True):
    """Saved model in a file."""

    kind: str = _KIND
    version: int = VERSION
    coefficients: Coefficients | None
    samples: list[_Row]
    held_out: list[_Row]


class LatencyModel(Fitted["Coefficients | str"]):
    """Learns step times online and predicts them; "not fitted" until the measured steps can separate the terms.

    Every fifth step is held out to measure the error. Other steps are kept in strata of similar shape, the newest 32 in
    each stratum, so that a thousand small steps do not displace one earlier large step.
    """

    def __init__(self, coefficients: Coefficients | None = None) -> None:
        """``coefficients``: initial model of the server, if known."""
        super().__init__()
        self.coefficients = coefficients
        self.observed = 0
        """Valid steps observed since the start."""
        self._strata: Strata[StepSample] = Strata()
        self._held_out: deque[StepSample] = deque(maxlen=_HELD_OUT)
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
        if self.observed % _HELD_OUT_EVERY == 0:
            self._held_out.append(sample)
        else:
            self._store(sample)
        if self.observed >= self._refit_at:
            self.fit()

    def fit(self) -> None:
        """Start a fit. If the steps do not allow one, the earlier fit stays, and the status gives the reason."""
        self._refit_at = self.observed + min(max(_REFIT_EVERY, self.observed // 4), _REFIT_AT_MOST_EVERY)
        if self.observed < MIN_SAMPLES:
            self._why_not = f"too few steps measured ({self.observed} of {MIN_SAMPLES})"
        else:
            self._make(learn, self._strata.samples())

    def _take(self, found: Coefficients | str) -> None:
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
        off = np.array([abs(model.seconds(s.shape) - s.seconds) / s.seconds for s in self._held_out])
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
        except msgspec.DecodeError:
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


def learn(samples: Sequence[StepSample]) -> Coefficients | str:
    """Return the coefficients fitted to these steps, or the reason why no fit is possible."""
    lengths = {s.shape.tokens for s in samples}
    if len(lengths) < 3 or max(lengths) < 2 * min(lengths):
        return f"steps too alike ({min(lengths)} to {max(lengths)} tokens, {len(lengths)} sizes)"
    try:
        return fit(samples)
    except RuntimeError as e:
        return str(e)
