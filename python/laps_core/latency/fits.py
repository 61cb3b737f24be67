"""Fits that are made at once, or elsewhere while decisions go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Fitting(Protocol[T_co]):
    """A fit under way, as a ``concurrent.futures.Future``."""

    def done(self) -> bool: ...

    def result(self) -> T_co: ...


class Fitted(Generic[T]):
    """Base of a model that is fitted to samples as they come. ``T``: the result of a fit."""

    def __init__(self) -> None:
        self.submit: Callable[..., Fitting[T]] | None = None
        """Has a function called elsewhere, as ``concurrent.futures.Executor.submit``, for a fit takes milliseconds;
        None = fits are made at once, by whoever reports a step."""
        self._fitting: Fitting[T] | None = None

    def settle(self) -> None:
        """Take over a fit that was made elsewhere, if one is done; call it where nothing is being decided."""
        if self._fitting is not None and self._fitting.done():
            found, self._fitting = self._fitting.result(), None
            self._take(found)

    def _make(self, learn: Callable[..., T], *known: Any) -> None:
        """Fit: ``learn`` is called with ``known``. Where one is under way elsewhere, nothing is done."""
        if self.submit is None:
            self._take(learn(*known))
        elif self._fitting is None:
            self._fitting = self.submit(learn, *known)

    def _take(self, found: T) -> None:
        """Use the result of a fit."""
        raise NotImplementedError
