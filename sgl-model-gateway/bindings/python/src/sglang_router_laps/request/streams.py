"""Streams, passed on event by event so that the client gets no partial event if a stream breaks off.

If input log-probabilities are requested, they come from the prefill server, and all other data from the decode server.
Streams and whole replies are then merged from both replies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from .body import read_json, write_json
from .replies import EVENT_END

ENDS = b"\n\n", b"\r\n\r\n"
END = ENDS[0]
FIELD = "input_token_logprobs"


class Events:
    """Buffer that holds back an event until it is complete."""

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def feed(self, chunk: bytes) -> bytes:
        """Return the events that ``chunk`` completes; chunks need not end where events do."""
        held = self._held
        if not held and chunk.endswith(ENDS):
            return chunk
        if held and held[-1].endswith((b"\r", b"\n")) and chunk.startswith((b"\r", b"\n")):
            # The end of an event may be split between two chunks.
            chunk = held.pop() + chunk
        cut = max(at + len(end) if (at := chunk.rfind(end)) >= 0 else 0 for end in ENDS)
        if not cut:
            held.append(chunk)
            return b""
        whole = b"".join((*held, chunk[:cut]))
        self._held = [chunk[cut:]] if cut < len(chunk) else []
        return whole

    def parts(self, chunk: bytes) -> Iterable[bytes]:
        """Return what ``feed`` returns, in parts that take little time to make."""
        return (self.feed(chunk),)

    def flush(self) -> bytes:
        """Return the remaining bytes when the stream has ended."""
        held, self._held = self._held, []
        return b"".join(held)


class MergedEvents(Events):
    """Buffer that also merges the prefill server's log-probabilities into each event of the decode server's stream."""

    def __init__(self, prefill: bytes) -> None:
        super().__init__()
        self._first: dict[int, Any] = {}
        for event in EVENT_END.split(prefill):
            reply = _payload(event)
            if isinstance(reply, dict):
                self._first.setdefault(reply.get("index", 0), reply)

    def parts(self, chunk: bytes) -> Iterable[bytes]:
        """Return the events that ``chunk`` completes, merged one by one: each holds a prompt's log-probabilities."""
        return (self._merged(event) + END for event in EVENT_END.split(self.feed(chunk))[:-1])

    def _merged(self, event: bytes) -> bytes:
        reply = _payload(event)
        if isinstance(reply, dict):
            _merge(reply, self._first.get(reply.get("index", 0)))
            with contextlib.suppress(ValueError):
                return b"data: " + write_json(reply)
        return event


def merge_reply(prefill: bytes, decode: bytes) -> bytes:
    """Return the decode server's reply with the prefill server's log-probabilities, for one prompt or a batch. Parts
    that cannot be parsed on either side stay unchanged."""
    try:
        mine, theirs = read_json(decode), read_json(prefill)
        for to, source in zip(*(r if isinstance(r, list) else [r] for r in (mine, theirs)), strict=False):
            _merge(to, source)
        return write_json(mine)
    except ValueError:
        return decode


def _merge(to: Any, source: Any) -> None:
    with contextlib.suppress(KeyError, TypeError):
        to["meta_info"][FIELD] = source["meta_info"][FIELD] + to["meta_info"][FIELD]


def _payload(event: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return read_json(event[5:]) if event.startswith(b"data:") else None
    return None
