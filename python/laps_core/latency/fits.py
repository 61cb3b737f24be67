"""Fits made at once, or in the background while decisions go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Fitting(Protocol[T_co]):
    """A running fit, like ``concurrent.futures.Future``."""

    def done(self) -> bool: ...

    def result(self) -> T_co: ...


class Fitted(Generic[T]):
    """Base of a model that is fitted to samples as they arrive. ``T``: the result of a fit."""

    def __init__(self) -> None:
        self.submit: Callable[..., Fitting[T]] | None = None
        """Runs a function in the background, like ``concurrent.futures.Executor.submit``, because a fit takes
        milliseconds; None = fit at once, in the call that observes a step."""
        self._fitting: Fitting[T] | None = None

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
