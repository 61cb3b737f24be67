"""Input log-probabilities come from the prefill server, all else from the decode server: one reply of both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .body import read_json, write_json
from .events import END, Events

FIELD = "input_token_logprobs"


def wanted(body: dict[str, Any]) -> bool:
    """Whether the request asks for log-probabilities (of any prompt of a batch)."""
    asked = body.get("return_logprob")
    return any(asked) if isinstance(asked, list) else bool(asked)


def merge_reply(prefill: bytes, decode: bytes) -> bytes:
    """A whole reply, of one prompt or of a batch. What cannot be read on either side stays as it is."""
    try:
        mine, theirs = read_json(decode), read_json(prefill)
        for to, source in zip(_items(mine), _items(theirs), strict=False):
            _merge(to, source)
        return write_json(mine)
    except ValueError:
        return decode


def _items(reply: Any) -> list[Any]:
    return reply if isinstance(reply, list) else [reply]


def _merge(to: Any, source: Any) -> None:
    try:
        to["meta_info"][FIELD] = source["meta_info"][FIELD] + to["meta_info"][FIELD]
    except (KeyError, TypeError):
        return


class StreamMerger:
    """Puts the prefill server's part into each event of the decode server's stream."""

    def __init__(self, prefill: bytes) -> None:
        self._first: dict[int, Any] = {}
        for event in prefill.split(END):
            reply = _payload(event)
            if isinstance(reply, dict):
                self._first.setdefault(reply.get("index", 0), reply)
        self._events = Events()

    def feed(self, chunk: bytes) -> bytes:
        """The events that ``chunk`` completes, merged; chunks need not end where events do."""
        return b"".join(self._merged(self._events.feed(chunk).split(END)[:-1]))

    def flush(self) -> bytes:
        """What is left when the stream has ended."""
        return self._events.flush()

    def _merged(self, events: list[bytes]) -> Iterator[bytes]:
        for event in events:
            reply = _payload(event)
            if isinstance(reply, dict):
                _merge(reply, self._first.get(reply.get("index", 0)))
                with contextlib.suppress(ValueError):
                    event = b"data: " + write_json(reply)
            yield event + END


def _payload(event: bytes) -> Any:
    if not event.startswith(b"data:"):
        return None
    try:
        return read_json(event[5:])
    except ValueError:
        return None
