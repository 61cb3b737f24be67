"""Attributes of SGLang's objects that have another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of `owner` these values while the context lasts, also if an exception ends it."""
    held = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(owner, name, value)
