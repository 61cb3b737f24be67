"""Record of one request, and its line in the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laps_core.pools.instances import Instance
from laps_core.receipts.receipt import RECEIPT_HEADER

from .ids import fresh

logger = logging.getLogger(__name__)

ID_HEADER = b"x-request-id"
DECISION_HEADER = b"x-laps-decision"
"""Header with the reason for the choice of the prefill server."""
ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
"""Headers searched for a client's id without --request-id-headers, as in the stock router."""
GONE = 499
"""Status of a request whose client disconnected, or that was aborted as somebody had asked."""
LINES_S = 0.25
"""Time for which log lines are collected (seconds): one log record per line would cost five times as much."""
_PLAIN = re.compile(r"[!#-~]{1,200}")
"""Ids that are safe in a header or log line."""


def request_id(headers: Sequence[tuple[bytes, bytes]], names: Mapping[bytes, int]) -> str | None:
    """Return the client's id from the first header in ``names`` (name -> position) with a valid id, else None."""
    found = [(names[name], value.decode("latin-1")) for name, value in headers if name in names]
    return next((text for _, text in sorted(found) if _PLAIN.fullmatch(text)), None) if found else None


@dataclass(eq=False, slots=True)
class Trail:
    """Timeline and outcome of one generation request. Times are monotonic seconds; None: not reached yet."""

    given: str | None
    """The client's id of the request; None if the client gave no id."""
    endpoint: str
    id: str = field(init=False)
    began: float = field(default_factory=time.monotonic)
    rid: str = "-"
    length_class: str = "-"
    decision: str = ""
    """Reason for the choice of the prefill server: pools.choice.Why, or retry; empty if none was chosen."""
    tokens: int = 0
    """Tokens expected to be computed."""
    placed: tuple[float, float] | None = None
    """Start and end of the request's wait in the queue."""
    prefill: Instance | None = None
    decode: Instance | None = None
    sent: float | None = None
    """Time at which the request was sent to the last pair of servers."""
    first_sent: float | None = None
    """Time at which the request was sent to the first pair of servers."""
    prefilled: float | None = None
    """Time of the answer of the last pair's prefill server."""
    first: float | None = None
    """Time of the first token."""
    retries: int = -1
    status: int = 0
    receipt: bytes = b""
    """Receipt for the answer, as JSON; empty = none."""
    span: Any = None
    """Span of the request's trace."""

    def __post_init__(self) -> None:
        self.id = self.given or fresh()

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        found = [(ID_HEADER, self.id.encode())]
        if self.decision:
            found.append((DECISION_HEADER, self.decision.encode()))
        if self.receipt:
            found.append((RECEIPT_HEADER.encode(), self.receipt))
        return tuple(found)

    def try_at(self, prefill: Instance, decode: Instance, now: float) -> None:
        """Record that the request is sent to these two servers."""
        self.prefill, self.decode, self.sent, self.prefilled = prefill, decode, now, None
        self.first_sent = now if self.first_sent is None else self.first_sent
        self.retries += 1

    def format_line(self, at: str, now: float) -> str:
        """Return the line for the access log. ``at``: date and time, as text."""
        prefill, decode = self.prefill, self.decode
        return (
            f"{at} id={self.id} rid={self.rid} route=/{self.endpoint} "
            f"class={self.length_class} tokens={self.tokens} prefill={prefill.url if prefill else '-'} "
            f"decode={decode.url if decode else '-'} queue_ms={_ms(*self.placed) if self.placed else 0} "
            f"prefill_ms={_ms(self.sent, self.prefilled)} first_ms={_ms(self.began, self.first)} "
            f"total_ms={_ms(self.began, now)} status={self.status} retries={max(0, self.retries)}"
        )


def _ms(start: float | None, end: float | None) -> str:
    return "-" if start is None or end is None else f"{1e3 * (end - start):.1f}"


class AccessLog:
    """Access log with one line for each request, at level info."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._second, self._text = 0, ""

    @staticmethod
    def to_stderr() -> None:
        """Write the lines to stderr without the prefix of other log records, because each line carries its own time."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False

    def note(self, trail: Trail) -> None:
        """Log a request that has ended. Needs a running event loop."""
        if not logger.isEnabledFor(logging.INFO):
            return
        at = time.time()
        second = int(at)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        if not self._lines:
            asyncio.get_running_loop().call_later(LINES_S, self.write)
        self._lines.append(trail.format_line(f"{self._text}.{int(1e3 * (at - second)):03d}Z", time.monotonic()))

    def write(self) -> None:
        """Write the lines collected so far."""
        if self._lines:
            lines, self._lines = self._lines, []
            logger.info("%s", "\n".join(lines))
