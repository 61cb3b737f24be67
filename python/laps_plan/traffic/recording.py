"""A recording: lengths and times of requests as a server had them, with what is needed to run them again. No text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from laps_core.latency.step import Coefficients
from laps_core.length import ClassName

KIND = "laps-recording"
"""In the first line of the file; the others are a request each (JSON lines)."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The server. Times in seconds."""

    kind: str = KIND
    model: Coefficients
    """The latency model."""
    config: dict[str, Any] = {}
    """The knobs (LapsConfig)."""
    chunk: int
    """New tokens of a batch."""
    layers: int = 0
    """Layers of the model; 0 = it runs no slices."""
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
    """Class it had there."""
    ttft_ms: float
    """Measured."""
    before_ms: float | None = None
    """Until the scheduler could run it: tokenizing and the like; None = not known."""
    after_ms: float | None = None
    """From its prefill to the client: the transfer and the like; None = not known."""
    host_ms: float | None = None
    """While the host built and launched batches and the device was idle; None = not known."""
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
    """Server and requests of the lines of a recording. Raises ValueError that names the line."""
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
        except (msgspec.MsgspecError, UnicodeError) as e:
            raise ValueError(f"line {n}: {e}") from None
    if head is None or head.kind != KIND:
        raise ValueError(f"line 1: not a {KIND}")
    return head, sorted(found, key=lambda r: r.arrival_ms)


def read(path: Path) -> Recording:
    """Undo ``Recording.save``. Raises ValueError or OSError, in one line that names the file."""
    try:
        with path.open(encoding="utf-8") as f:
            return Recording(*lines_of(f))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
