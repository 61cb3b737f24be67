"""A recording: lengths and times of a server's requests, and what a replay needs besides. No text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from laps_core.latency.step import Coefficients
from laps_core.length import ClassName

KIND = "laps-recording"
"""Kind in the first line of the file; each other line is a request (JSON lines)."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Data of the server. Times in seconds."""

    kind: str = KIND
    model: Coefficients
    """The latency model."""
    config: dict[str, Any] = {}
    """The knobs (LapsConfig)."""
    chunk: int
    """Maximum new tokens of a batch."""
    layers: int = 0
    """Layers of the model; 0 = the server runs no slices."""
    launch_s: float = 0.0
    """Host time to launch a pass in slices."""
    overlap: bool = False
    """True with SGLang's overlap loop."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times in milliseconds."""

    arrival_ms: float
    new_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    cls: ClassName = msgspec.field(name="class")
    """Class of the request on the server."""
    ttft_ms: float
    """Measured TTFT."""
    before_ms: float | None = None
    """Time until the scheduler could run the request: tokenizing and the like; None if unknown."""
    after_ms: float | None = None
    """Time from prefill to the client: the transfer and the like; None if unknown."""
    host_ms: float | None = None
    """Time in which the host built and launched batches while the device was idle; None if unknown."""
    rank: int = 0
    """Data-parallel rank."""


class Recording(msgspec.Struct, frozen=True):
    """A server and its requests, in order of their arrival."""

    head: Head
    requests: list[Recorded]

    def save(self, path: Path) -> None:
        """Write as JSON lines. Raises OSError."""
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (self.head, *self.requests)))


def lines_of(lines: Iterable[str]) -> tuple[Head, list[Recorded]]:
    """Return server and requests from the lines of a recording. Raises ValueError that names the line."""
    head: Head | None = None
    found: list[Recorded] = []
    for n, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            if head is None:
                head = msgspec.json.decode(line, type=Head)
            else:
                found.append(msgspec.json.decode(line, type=Recorded))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
            raise ValueError(f"line {n}: {e}") from None
    if head is None or head.kind != KIND:
        raise ValueError(f"line 1: not a {KIND}")
    return head, sorted(found, key=lambda r: r.arrival_ms)


def read(path: Path) -> Recording:
    """Return the recording that ``Recording.save`` wrote. Raises ValueError or OSError (one line, with the file)."""
    try:
        with path.open(encoding="utf-8-sig") as f:
            return Recording(*lines_of(f))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
