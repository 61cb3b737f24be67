"""``POST /laps_replay``: one replay at a time, in a separate process, for a bounded time."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sglang_laps.http import replay_route
from sglang_laps.http.replay_route import Replays

Answer = tuple[int, Any]


class Scripted(Replays):
    """Replays that run a script in place of ``laps-plan``."""

    def __init__(self, script: str, url: str = "http://127.0.0.1:9", **how: Any) -> None:
        super().__init__(lambda: url, lambda: "the key", **how)
        self.script = script
        self.asked: list[float] = []

    def _command(self, wanted: replay_route.Wanted) -> Sequence[str]:
        self.asked.append(wanted.seconds)
        return [sys.executable, "-c", self.script]


async def ask(replays: Replays, body: bytes = b'{"seconds": 30}') -> Answer:
    code, text = await replays.answer(body)
    return code, msgspec.json.decode(text)


TELL = "import json, os; print(json.dumps([os.environ['LAPS_API_KEY'], os.getpid()]))"


def test_replay_runs_in_separate_process_with_api_key() -> None:
    replays = Scripted(TELL)
    code, (key, pid) = asyncio.run(ask(replays))
    assert (code, key) == (200, "the key")
    assert pid != os.getpid()
    assert asyncio.run(ask(replays, b""))[0] == 200
    assert replays.asked == [30.0, 60.0]


@pytest.mark.parametrize("body", [b"[]", b'{"seconds": 0}', b'{"seconds": 1e9}', b'{"second": 1}', b"{"])
def test_invalid_replay_request_returns_400(body: bytes) -> None:
    replays = Scripted(TELL)
    assert asyncio.run(ask(replays, body))[0] == 400
    assert replays.asked == []


def test_each_server_runs_one_replay_at_a_time() -> None:
    async def three() -> list[int]:
        slow = "import time; time.sleep(1.0); print(1)"
        same = (Scripted(slow), Scripted(slow))
        answers = await asyncio.gather(*(ask(r) for r in same), ask(Scripted(TELL, url="http://127.0.0.1:10")))
        return [code for code, _ in answers] + [(await ask(same[1]))[0]]

    assert asyncio.run(three()) == [200, 409, 200, 200]


def test_slow_replay_returns_504() -> None:
    code, said = asyncio.run(ask(Scripted("import time; time.sleep(60)", longest_s=0.3)))
    assert code == 504
    assert "0.3 s" in said["error"]["message"]


def test_client_disconnect_releases_replay_lock() -> None:
    async def leave() -> int:
        replays = Scripted("import time; time.sleep(60)")
        asked = asyncio.create_task(ask(replays))
        await asyncio.sleep(0.3)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        replays.script = TELL
        return (await ask(replays))[0]

    assert asyncio.run(leave()) == 200


def test_replay_command_is_laps_plan_at_lowest_priority() -> None:
    code, said = asyncio.run(ask(Replays(lambda: "http://127.0.0.1:9", lambda: None)))
    assert code == 503
    assert said["error"]["message"].startswith("laps-plan: http://127.0.0.1:9/laps_status: ")
    assert "os.nice(19)" in replay_route.NICED
    assert "signal.alarm(130)" in replay_route.NICED, "ends without its server, too"
    assert json.dumps(said)


def test_replay_reaches_own_server_despite_tls_and_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=elsewhere -keyout key.pem -out cert.pem"
    try:
        subprocess.run(made.split(), cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(418)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            code, said = asyncio.run(ask(Replays(lambda: f"https://localhost:{server.server_port}", lambda: "k")))
        finally:
            server.shutdown()
    assert code == 503
    assert ": 418, " in said["error"]["message"]
