"""Client connections, parsed by httptools (a fifth of h11's time) and bounded in size and time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..request.replies import error_body

HEAD_MAX = 1 << 16
"""Largest head, chunk extensions or trailers: each is buffered as a whole (bytes)."""
HEAD_S = 30.0
"""Longest time for a head, from its first byte on (seconds)."""
STALL_S = 60.0
"""Period of checks whether a client reads its answer (seconds)."""
SLOWEST = 512
"""Slowest client that is not disconnected (bytes/s)."""


HANG_UP = "laps.hang_up"
"""Extension of a request's scope: closes the connection, whatever the client has not read."""


class PipelinedError(Exception):
    """A request arrived before the previous one was answered."""


class BoundedProtocol(HttpToolsProtocol):
    """Serves one request at a time: input behind it is dropped, and the connection closes with the answer, as HTTP
    allows (RFC 9112, s9.3.2). Nothing is buffered for later, so reading goes on, and only a connection that is read
    reports that its client has left.

    uvicorn's own protocol buffers any number of requests, notices a disconnect for the last of them only, buffers heads
    of any size, and waits without limit for a head and for a client that does not read its answer.
    """

    stall_s = STALL_S

    _kept = 0
    """Bytes received since a part of the message was last passed on."""
    _in_head = False
    _drops = False
    """True once all further input is ignored."""
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _unsent = 0
    """Bytes that the client had not read at the last check of the write buffer."""

    @classmethod
    def within(cls, timeout_s: float) -> type[BoundedProtocol]:
        """Return this protocol for requests that may take ``timeout_s`` (seconds)."""
        return type(cls.__name__, (cls,), {"stall_s": min(STALL_S, timeout_s)})

    @property
    def _answering(self) -> bool:
        """Return True while a request has not been fully answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timer: a client that has sent nothing yet is idle, too."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers when the connection is closed by either side."""
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Abort an unanswered request: a client that has closed its side will not read the answer."""
        if self._answering:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse ``data``; refuse the request (400) and close the connection if the head is too large."""
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
        """Refuse input that cannot be parsed, without breaking an answer that is being sent."""
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
        """Begin a new request. Raises PipelinedError."""
        if self._answering:
            raise PipelinedError
        self._in_head = True
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: self.transport.abort}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Pass on a header of the head. Trailers are dropped: the request was judged by its head."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the head on and stop its timer."""
        self._kept, self._in_head = 0, False
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._kept = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        """Start the stall timer when the write buffer fills up."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Stop the stall timer once the client has read the buffer."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_stall_timer()

    def on_response_complete(self) -> None:
        """Watch that the client also reads the rest of a connection's last answer."""
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection of an idle client; abort it if part of an answer is still unread."""
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
