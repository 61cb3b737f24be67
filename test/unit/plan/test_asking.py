"""Requests of laps-plan and laps-top to servers that redirect, or whose answer is no HTTP or cut off."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from laps_plan import asking
from laps_plan.replay.source import fetch
from laps_plan.traffic.mixed import ask
from laps_top.ask import Server

CUT = b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"enabled": true'
OTHER = b"SSH-2.0-OpenSSH_9.2\r\n"


@contextmanager
def answering(said: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Run a server that answers everything with ``said``; yield its URL and the requests that came."""
    asked: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(65536))
                connection.sendall(said)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


ASKS: list[Callable[[str], object]] = [ask, lambda url: fetch(url, 60.0)]


@pytest.mark.parametrize("ask", ASKS)
def test_key_is_not_sent_to_redirect_target(ask: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(asking.KEY, "secret")
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as (other, got):
        moved = f"HTTP/1.1 302 Found\r\nLocation: {other}/x\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(moved) as (url, first), pytest.raises(ValueError, match="302, Found"):
            ask(url)
        assert b"Authorization: Bearer secret" in first[0]
        assert got == []


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("said", [CUT, OTHER, b""])
def test_broken_answer_gives_one_line(ask: Callable[[str], object], said: bytes) -> None:
    with answering(said) as (url, _), pytest.raises(ValueError, match=url) as e:
        ask(url)
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize("ask", ASKS)
def test_url_with_invalid_port_gives_one_line(ask: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="abc"):
        ask("http://127.0.0.1:abc")


@pytest.mark.parametrize("said", [CUT, OTHER])
def test_laps_top_shows_broken_answer_as_error(said: bytes) -> None:
    with answering(said) as (url, _):
        assert Server(url).ask().error.startswith("no answer: ")
    assert Server("http://127.0.0.1:abc").ask().error.startswith("no answer: ")
