"""Answers of one server, over HTTP."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, Request, build_opener

import msgspec
from laps_core.protocol import MAX_AGE, STATUS_ROUTE
from laps_core.receipts.receipt import RECEIPTS_ROUTE

SECONDS = 30
"""Age limit of the receipts that are shown (seconds)."""
RETRY_S = 30.0
"""Time after which a route that a server does not have is requested again (seconds)."""
FRESH_S = 0.9
"""Accepted age of a status (seconds)."""


class Behind(msgspec.Struct):
    """A request that used the device while another request waited."""

    rid: str
    tokens: int = 0
    ms: float = 0.0


class Seen(msgspec.Struct):
    """A receipt, parsed so that causes of later releases are no error. Times in milliseconds."""

    rid: str
    ttft_ms: float
    cls: str = msgspec.field(name="class", default="")
    arrived_s: float = 0.0
    """Unix time of arrival, by the clock of the server (seconds)."""
    causes: dict[str, float] = msgspec.field(default_factory=dict)
    behind: list[Behind] = msgspec.field(default_factory=list)


class _Seen(msgspec.Struct):
    receipts: list[Seen]


@dataclass(frozen=True)
class Answer:
    """Answers of one server, at one time."""

    status: Mapping[str, Any] | None = None
    """Status of the server; None if it has not answered."""
    error: str = ""
    """Reason for a missing status, in one line."""
    recent: tuple[Seen, ...] | None = None
    """Receipts of the last SECONDS; None if the server has given none."""


def _words(e: Exception) -> str:
    """Return an error in one line."""
    cause = getattr(e, "reason", e)
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(str(text).split())


class _NoRedirect(HTTPRedirectHandler):
    """Handler that treats redirects as errors, because the key is only for the named server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return None, so that no other request is sent."""


@dataclass
class Server:
    """One prefill server or router."""

    url: str
    key: str | None = None
    timeout_s: float = 3.0
    """Timeout of each answer (seconds)."""
    _retry_s: float = field(default=0.0, init=False)
    """Receipts are not requested before this time; all times here are of this machine's monotonic clock."""
    _asked_s: float | None = field(default=None, init=False)
    """Time of the last answer with receipts."""
    _kept: dict[str, tuple[float, Seen]] = field(default_factory=dict, init=False)
    """Receipts by id, with the time when they are dropped."""

    def __post_init__(self) -> None:
        """Normalise the URL, with http as the default scheme. Raises ValueError if it is not an http(s) URL."""
        self.url = (self.url if "://" in self.url else f"http://{self.url}").rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{self.url} is not an http(s) URL")
        self._open = build_opener(_NoRedirect).open

    def ask(self) -> Answer:
        """Return the server's present answer; errors are part of the answer."""
        try:
            status = msgspec.json.decode(self._get(STATUS_ROUTE, {MAX_AGE: FRESH_S}))
            if not isinstance(status, dict):
                return Answer(error="no status of LAPS")
        except HTTPError as e:
            return Answer(error={401: "needs the key (--api-key)", 404: "no LAPS here"}.get(e.code, f"HTTP {e.code}"))
        except (OSError, HTTPException, ValueError, RecursionError) as e:
            return Answer(error=f"no answer: {_words(e)}")
        now = time.monotonic()
        if now < self._retry_s or "prefill" in status:
            return Answer(status)
        try:
            self._keep(now)
        except HTTPError as e:
            self._retry_s = now + RETRY_S * (e.code == 404)
            return Answer(status)
        except (OSError, HTTPException, ValueError, RecursionError):
            return Answer(status)
        return Answer(status, recent=tuple(receipt for _, receipt in self._kept.values()))

    def _keep(self, now: float) -> None:
        """Request new receipts, and drop old receipts."""
        missing_s = SECONDS if self._asked_s is None else min(SECONDS, math.ceil(now - self._asked_s) + 1)
        body = self._get(RECEIPTS_ROUTE, {"seconds": missing_s})
        found = {r.rid: (r.arrived_s + r.ttft_ms / 1e3, r) for r in msgspec.json.decode(body, type=_Seen).receipts}
        newest_s = max((ended_s for ended_s, _ in found.values()), default=0.0)
        self._asked_s = now
        self._kept.update({rid: (now + SECONDS - (newest_s - ended_s), r) for rid, (ended_s, r) in found.items()})
        self._kept = {rid: (until_s, r) for rid, (until_s, r) in self._kept.items() if until_s > now}

    def _get(self, route: str, query: Mapping[str, Any]) -> bytes:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        asked = Request(f"{self.url}/{route}?{urlencode(query)}", headers=headers)
        with self._open(asked, timeout=self.timeout_s) as reply:
            body: bytes = reply.read()
        return body
