"""Connections of clients: parsed by httptools, a fifth of the time that h11 takes, and held within bounds."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..request.replies import error_body

HEAD_MAX = 1 << 16
"""Most of a head, of a chunk's extensions or of trailers: each is handed on only as a whole (bytes)."""
HEAD_S = 30.0
"""How long a head may take from its first byte on (seconds)."""
STALL_S = 60.0
"""How often is looked whether a client takes what waits for it (seconds)."""
SLOWEST = 512
"""A client that takes less is gone (bytes/s)."""


HANG_UP = "laps.hang_up"
"""Extension of a request's scope: ends its connection, whatever the client has not taken."""


class PipelinedError(Exception):
    """A request has come before the one before it was answered."""


class BoundedProtocol(HttpToolsProtocol):
    """One request at a time: what comes behind it before its answer has ended is dropped, and the connection closes
    with that answer, as HTTP allows (RFC 9112, s9.3.2). So nothing is kept for later, and all that is read goes on
    being read, for only a connection that is read from says that its client has left.

    uvicorn's own keeps any number of requests, hears of a client's end for the last of them only, keeps a head
    whatever its size, and waits for ever: for a head, and for a client that does not take its answer.
    """

    stall_s = STALL_S

    _kept = 0
    """What has come since anything was handed on (bytes)."""
    _in_head = False
    _drops = False
    """Nothing that comes now will be read."""
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _unsent = 0
    """Bytes that the client had not taken when the write buffer was last looked at."""

    @classmethod
    def within(cls, timeout_s: float) -> type[BoundedProtocol]:
        """This protocol, for requests that may take ``timeout_s`` (seconds)."""
        return type(cls.__name__, (cls,), {"stall_s": min(STALL_S, timeout_s)})

    @property
    def _answering(self) -> bool:
        """A request has not been answered to its end."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timer: a client that has sent nothing yet is idle, too."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or was left."""
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client has left: it is not waited for until it has taken what it has asked for."""
        if self._answering:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take in what has come; refuse the request (400) and hang up where too much of it is no body."""
        if self._drops:
            return
        self._kept += len(data)
        super().data_received(data)
        if self._drops or self.transport.is_closing():
            return
        if self._kept > HEAD_MAX:
            self.send_400_response("The head of the request is too large.")
        elif not self._answering and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read; an answer that is under way is not broken by it."""
        if not self._answering:
            self._refuse(400, "Bad Request", "invalid_request_error", msg)
        elif not self.cycle.more_body:
            self._drops, self.cycle.keep_alive = True, False
        elif self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(400, "Bad Request", "invalid_request_error", msg)

    def _refuse(self, status: int, reason: str, kind: str, message: str) -> None:
        body = error_body(status, kind, message)
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + body)
        self.transport.close()

    def _head_is_late(self) -> None:
        if self._in_head:
            self._refuse(408, "Request Timeout", "request_timeout", "the head of the request did not arrive in time")
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        """A head begins. Raises PipelinedError."""
        if self._answering:
            raise PipelinedError
        self._in_head = True
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: self.transport.abort}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of the head. Trailers are none: who has read the head has judged the request by it."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head has been handed on."""
        self._kept, self._in_head = 0, False
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """So has this."""
        self._kept = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        """Much waits for the client to take it."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """It has taken that."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_stall_timer()

    def on_response_complete(self) -> None:
        """Watch that the client takes the rest of a connection's last answer, too."""
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection of an idle client; abort it if part of an answer is still not taken."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _watch_writing(self) -> None:
        if self._stall_timer is None:
            self._unsent = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(self.stall_s, self._look_at_writing)

    def _look_at_writing(self) -> None:
        self._stall_timer = None
        if self.transport.get_write_buffer_size() > self._unsent - SLOWEST * self.stall_s:
            self.transport.abort()
        else:
            self._watch_writing()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
