"""What became of one request, and the line of the access log that tells it."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..servers.instances import Instance
from .ids import fresh

logger = logging.getLogger(__name__)

ID_HEADER = b"x-request-id"
DECISION_HEADER = b"x-laps-decision"
"""Why the prefill server was chosen."""
ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
"""Where a client's id is looked for unless --request-id-headers says otherwise: as the stock router does."""
GONE = 499
"""The status in the log of a request whose client went away."""
LINES_S = 0.25
"""Lines are written together, so much late: a record for each would cost five times as much as the line (seconds)."""
_PLAIN = re.compile(r"[!#-~]{1,200}")
"""What stands in a header, or in a line of the log, as it is."""


def request_id(headers: Sequence[tuple[bytes, bytes]], names: Mapping[bytes, int]) -> str | None:
    """The client's id, in the first that has one of the headers ``names``, each with its turn; None without one."""
    found = [(names[name], value.decode("latin-1")) for name, value in headers if name in names]
    return next((text for _, text in sorted(found) if _PLAIN.fullmatch(text)), None) if found else None


class Trail:
    """Of one request that is to be generated from. Times are monotonic seconds; None: it has not come so far."""

    __slots__ = (
        "began", "decision", "decode", "endpoint", "first", "id", "length_class", "made", "placed", "prefill",
        "prefilled", "retries", "rid", "sent", "span", "status", "tokens",
    )  # fmt: skip

    def __init__(self, given: str | None, endpoint: str) -> None:
        """``given``: the client's id of it."""
        self.id, self.made, self.endpoint = given or fresh(), given is None, endpoint
        self.began = time.monotonic()
        self.rid = self.length_class = "-"
        self.decision = ""
        """Why its prefill server was chosen: pools.choice.Why, or retry; empty: none was."""
        self.tokens = 0
        """Expected to be computed."""
        self.placed: tuple[float, float] | None = None
        """From when to when it waited in the queue."""
        self.prefill: Instance | None = None
        self.decode: Instance | None = None
        self.sent: float | None = None
        """To the last pair of servers that it was sent to."""
        self.prefilled: float | None = None
        """When that prefill server had answered."""
        self.first: float | None = None
        """When its first token had come."""
        self.retries = -1
        self.status = 0
        self.span: Any = None
        """Of a trace."""

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """For the answer."""
        named = (ID_HEADER, self.id.encode())
        return (named, (DECISION_HEADER, self.decision.encode())) if self.decision else (named,)

    def try_at(self, prefill: Instance, decode: Instance, now: float) -> None:
        """It is sent to these two."""
        self.prefill, self.decode, self.sent, self.prefilled = prefill, decode, now, None
        self.retries += 1

    def told(self, at: str, now: float) -> str:
        """A line that says all of it; ``at``: the time of day."""
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
    """One line for each request, at level info."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._second, self._text = 0, ""

    @staticmethod
    def to_stderr() -> None:
        """Lines of their own, for they have a time: not with the beginning that other records have."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False

    def note(self, trail: Trail) -> None:
        """The request has ended. Needs a running event loop."""
        if not logger.isEnabledFor(logging.INFO):
            return
        at = time.time()
        second = int(at)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        if not self._lines:
            asyncio.get_running_loop().call_later(LINES_S, self.write)
        self._lines.append(trail.told(f"{self._text}.{int(1e3 * (at - second)):03d}Z", time.monotonic()))

    def write(self) -> None:
        """All that has not been written yet."""
        if self._lines:
            lines, self._lines = self._lines, []
            logger.info("%s", "\n".join(lines))
