"""Client connections: parsed by httptools (in a fifth of h11's time), with limits of size and time."""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..request.replies import error_body

HEAD_MAX = 1 << 16
"""Largest request head, chunk extensions or trailers (bytes): the parser buffers each of them as a whole."""
HEAD_S = 30.0
"""Time limit for a request head, from its first byte on (seconds)."""
UNREAD_S = 0.1
"""Time in which data that has arrived is read (seconds)."""
STALL_S = 60.0
"""Period of the checks that a client reads its answer (seconds)."""
SLOWEST = 512
"""Least rate at which a client must read; a slower client is disconnected (bytes/s)."""

UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)
"""Start of the header that offers another protocol."""
HANG_UP = "laps.hang_up"
"""Key in a request's ASGI extensions: function that closes the connection at once, even with unread output."""


class PipelinedError(Exception):
    """A request arrived before the previous request was answered."""


class BoundedProtocol(HttpToolsProtocol):
    """Client connection that serves one request at a time. Input behind a request is dropped, and the connection closes
    after the answer, as HTTP allows (RFC 9112, s9.3.2). Nothing is buffered for a later request, so reading goes on:
    a disconnect is reported only on a connection that is read.

    uvicorn's own protocol buffers any number of requests, and notices a disconnect only for the last of them. It
    buffers heads of any size, and waits without limit for a head and for a client that does not read its answer.
    """

    stall_s = STALL_S

    _kept = 0
    """Bytes received since the parser last passed on a part of a message."""
    _in_head = False
    _drops = False
    """True once all further input is ignored."""
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _unsent = 0
    """Bytes that the client had not read at the last check of the write buffer."""

    @classmethod
    def within(cls, timeout_s: float) -> type[BoundedProtocol]:
        """Return a protocol class for requests with the time limit ``timeout_s`` (seconds)."""
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
        """Close the connection of an unanswered request: a client that has closed its side will not read the answer."""
        if self._answering:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse ``data``. If the head is too large, refuse the request (400) and close the connection."""
        if self._drops:
            return
        self._kept += len(data)
        if not self._answering and (b"pgrade:" in data or b"PGRADE:" in data):
            # httptools drops the body of a request that offers another protocol. HTTP allows to ignore the offer.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"\nTrailer:", head) + end + rest
        super().data_received(data)
        if self._drops or self.transport.is_closing():
            return
        if self._kept > HEAD_MAX:
            self.send_400_response("The head of the request is too large.")
        elif not self._answering and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def send_400_response(self, msg: str) -> None:
        """Refuse input that cannot be parsed. Finish the answer first if its request has arrived completely."""
        if self._answering and not self.cycle.more_body:
            self._drops, self.cycle.keep_alive = True, False
        elif self._answering and self.cycle.response_started:
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
        """Start a new request. Raises PipelinedError if the previous request is not answered."""
        if self._answering:
            raise PipelinedError
        self._in_head = True
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: self.transport.abort}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Pass on a header of the head. Drop trailers: the router has already judged the request by its head."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass on the head and stop its timer."""
        self._kept, self._in_head = 0, False
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._kept = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        """Start the stall timer when the write buffer fills up."""
        super().pause_writing()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        """Stop the stall timer once the client has read enough of the buffer."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_stall_timer()

    def on_response_complete(self) -> None:
        """Start the stall timer if the client has not yet read all of the connection's last answer."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_stall_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection of an idle client soon. If this router stood still, a request may have arrived that is
        not read yet: data that is read meanwhile cancels the timer."""
        self.timeout_keep_alive_task = self.loop.call_later(UNREAD_S, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connection, or let it close as soon as the client has read its last answer."""
        super().timeout_keep_alive_handler()
        self._start_stall_timer()

    def _start_stall_timer(self) -> None:
        if self._stall_timer is None and self.transport.get_write_buffer_size():
            self._unsent = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(self.stall_s, self._check_stall)

    def _check_stall(self) -> None:
        self._stall_timer = None
        if self.transport.get_write_buffer_size() > self._unsent - SLOWEST * self.stall_s:
            self.transport.abort()
        else:
            self._start_stall_timer()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
