"""Fits made at once, or in the background while decisions go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

_WRONG, _CLEARLY = 0.1, 0.5
"""Clearly better: the mean error is above ``_WRONG``, and without the older steps at most this share of it."""
_OUTLIER = 0.5
"""Relative error from which errors count alike."""

T = TypeVar("T")


class Learned(NamedTuple, Generic[T]):
    """Result of a fit that can forget steps of a device that had another speed."""

    found: T
    outdated: int | None = None
    """Steps up to this number were left out, because the device has another speed now."""


class Fitted(Generic[T]):
    """Base of a model that is fitted to samples as they arrive. ``T``: the result of a fit."""

    def __init__(self) -> None:
        self.submit: Callable[..., Future[T]] | None = None
        """Runs a function in the background, like ``concurrent.futures.Executor.submit``, because a fit takes
        milliseconds; None = fit at once, in the call that observes a step."""
        self._fitting: Future[T] | None = None

    def settle(self) -> None:
        """Use the result of a background fit if it is done. Do not call this while a decision is being made."""
        if self._fitting is not None and self._fitting.done():
            found, self._fitting = self._fitting.result(), None
            self._take(found)

    def _make(self, learn: Callable[..., T], *known: Any) -> None:
        """Fit by calling ``learn`` with ``known``; does nothing while a background fit runs."""
        if self.submit is None:
            self._take(learn(*known))
        elif self._fitting is None:
            self._fitting = self.submit(learn, *known)

    def _take(self, found: T) -> None:
        """Use the result of a fit."""
        raise NotImplementedError


def mean_error(errors: npt.ArrayLike) -> float:
    """Return the mean of relative errors, each clipped, so that a few outliers do not decide."""
    return float(np.minimum(errors, _OUTLIER).mean())


def clearly_better(known: T, again: Callable[[], T | None], error: Callable[[T], float]) -> T | None:
    """Return the fit that ``again`` makes without older steps if it is clearly better than ``known``, else None."""
    if (off := error(known)) <= _WRONG:
        return None
    found = again()
    return found if found is not None and error(found) <= _CLEARLY * off else None


def scramble(n: int) -> int:
    """Return a 32-bit number for ``n`` that looks random, the same in every run."""
    for shift in (16, 13):
        n = (n ^ n >> shift) * 0x45D9F3B & 0xFFFFFFFF
    return n ^ n >> 16
