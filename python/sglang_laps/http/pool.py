"""The pool record of a prefill server. Routers compare and set the record; the server only keeps it.

All HTTP processes of a server (--tokenizer-worker-num) share one record, in a memory file of the launcher. The file
disappears with the launcher.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import msgspec
from laps_core.protocol import PoolChange, PoolRecord, read

from sglang_laps.http.errors import error

ENV = "SGLANG_LAPS_POOL"
"""Environment variable with the path of the memory file. The launcher sets it for its HTTP processes."""


class PoolCell:
    """The pool record at ``path``, which starts as an empty file. Any process can open the file."""

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def make(cls) -> PoolCell:
        """Create the record of a new server. The record lasts as long as this process."""
        os.environ[ENV] = f"/proc/{os.getpid()}/fd/{os.memfd_create('laps-pool')}"
        return cls.of_this_server()

    @classmethod
    def of_this_server(cls) -> PoolCell:
        """Return the record that the launcher created. Raises KeyError if the launcher created none."""
        return cls(os.environ[ENV])

    def read(self) -> PoolRecord:
        with self._locked() as file:
            return _in(file)

    def apply_change(self, body: bytes) -> tuple[int, bytes]:
        """Apply a PoolChange. Return HTTP status and body: 200, 409 for another version, 400 for an invalid body."""
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
