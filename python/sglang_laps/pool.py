"""The pool record of a prefill server: routers compare and set it, the server only keeps it.

One for all HTTP processes of a server (--tokenizer-worker-num): it lies in a memory file of the launcher's, and is gone
with it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import msgspec
from laps_core.protocol import PoolChange, PoolRecord, read

from sglang_laps.errors import error

ENV = "SGLANG_LAPS_POOL"
"""Set by the launcher for its HTTP processes: where the memory file is."""


class PoolCell:
    """The record at ``path``, an empty file at first. Any process may open it."""

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def make(cls) -> PoolCell:
        """A new one; it lasts as long as this process."""
        os.environ[ENV] = f"/proc/{os.getpid()}/fd/{os.memfd_create('laps-pool')}"
        return cls.of_this_server()

    @classmethod
    def of_this_server(cls) -> PoolCell:
        """The one that the launcher has made. Raises KeyError where none has."""
        return cls(os.environ[ENV])

    def read(self) -> PoolRecord:
        """Return the record as it is now."""
        with self._locked() as file:
            return _in(file)

    def asked(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a PoolChange: 200, 409, or 400 for what is none."""
        try:
            change = read(body, PoolChange)
        except ValueError as e:
            return error(400, str(e))
        with self._locked() as file:
            record = _in(file)
            made = change.of(record)
            if made is not None:
                text = msgspec.json.encode(made)
                file.seek(0)
                file.write(text)
                file.truncate()
        return (409, msgspec.json.encode(record)) if made is None else (200, text)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        with open(self._path, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def _in(file: BinaryIO) -> PoolRecord:
    text = file.read()
    return read(text, PoolRecord) if text else PoolRecord()
