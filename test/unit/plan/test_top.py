"""``laps-top`` with servers on loopback whose answers a test sets."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from laps_plan import asking
from laps_top import command
from laps_top.ask import Answer, Seen, Server
from laps_top.draw import draw
from laps_top.rows import Quantiles, row, table

STATUS: dict[str, Any] = {
    "enabled": True,
    "queues": {"short": {"depth": 3, "oldest_wait_s": 0.25}, "long": {"depth": 1, "oldest_wait_s": 1.5}},
    "load": {"busy_share": 0.75},
    "preemption": {"by_short_batches": 40, "by_smaller_prompts": 2},
    "latency_model": {"error": {"median": 0.05}},
    "holds": 100_000,
}
ROUTER: dict[str, Any] = {
    "prefill": [{"signals": {"busy_share": 0.5}}, {"signals": {"busy_share": 1.0}}],
    "decode": [{"kv_tokens": {"held": 300}}, {"kv_tokens": {"held": None}}],
    "queued": 4,
    "oldest_queued_s": 0.1,
    "ttft_ms": {"short": {"p50": 10.0, "p90": 20.0}, "long": {"p50": None, "p90": None}},
}


def receipt(rid: str, cls: str, ttft_ms: float, behind: str = "") -> dict[str, Any]:
    causes = {"behind_long": 0.75 * ttft_ms, "computing": 0.25 * ttft_ms, "a cause of tomorrow": 0.0}
    return {
        "rid": rid,
        "class": cls,
        "ttft_ms": ttft_ms,
        "causes": causes,
        "behind": [{"rid": behind}] if behind else [],
    }


@dataclass
class FakeServer:
    """Answers of a fake server."""

    status: Any = field(default_factory=lambda: dict(STATUS))
    receipts: list[dict[str, Any]] | None = None
    key: str = ""
    redirect: str = ""
    asked: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    seconds: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def serve(fake: FakeServer) -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
            fake.asked.append(path)
            fake.keys.append(self.headers.get("authorization"))
            fake.seconds += query.get("seconds", [])
            if fake.redirect:
                self.send_response(302)
                self.send_header("location", fake.redirect)
                self.end_headers()
                return
            body: Any = fake.status
            if path == "/laps_receipts" and fake.receipts is not None:
                body = {"receipts": fake.receipts}
            missing = path != "/laps_status" and body is fake.status
            barred = fake.key and self.headers.get("authorization") != f"Bearer {fake.key}"
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(401 if barred else 404 if missing else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_prefill_row_combines_status_and_receipts() -> None:
    with serve(FakeServer(receipts=[receipt(str(n), "short", float(n)) for n in range(1, 11)])) as fake:
        found = row(fake.url, Server(fake.url).ask())
    assert found.kind == "prefill"
    assert not found.error
    assert found.waiting == {"short": 3, "long": 1}
    assert (found.oldest_wait_s, found.busy_share, found.preemptions) == (1.5, 0.75, 42)
    assert (found.model_error, found.kv_tokens) == (0.05, 100_000)
    assert found.ttft_ms == {"short": Quantiles(6.0, 10.0), "long": Quantiles()}


def test_preemptions_are_summed_over_dp_ranks() -> None:
    assert row("u", Answer({**STATUS, "ranks": [STATUS, STATUS]})).preemptions == 84


def test_router_row_shows_router_status() -> None:
    with serve(FakeServer(status=ROUTER)) as fake:
        found = row(fake.url, Server(fake.url).ask())
        assert fake.asked == ["/laps_status"]
    assert found.kind == "router"
    assert (found.waiting, found.oldest_wait_s, found.busy_share, found.kv_tokens) == ({"all": 4}, 0.1, 0.75, 300)
    assert found.ttft_ms == {"short": Quantiles(10.0, 20.0), "long": Quantiles()}


@pytest.mark.parametrize("status", [{"enabled": True}, {"prefill": []}, {"enabled": True, "queues": 1, "load": None}])
def test_incomplete_status_gives_row_with_gaps(status: dict[str, Any]) -> None:
    found = row("u", Answer(status))
    assert found.kind
    assert found.busy_share is None
    assert draw(table({"u": Answer(status)}, 1))


@pytest.mark.parametrize(
    "status",
    [
        {"enabled": True, "queues": {"short": {"depth": "x", "oldest_wait_s": 1.0}, "long": {"oldest_wait_s": "y"}}},
        {**STATUS, "holds": {"tokens": 5}},
        {"enabled": True, "ranks": 7},
        {"prefill": None},
        {"prefill": [], "queued": [1]},
        {"prefill": [], "decode": 3},
    ],
)
def test_status_of_other_types_leaves_other_servers_in_view(status: dict[str, Any]) -> None:
    shown = table({"odd": Answer(status), "u": Answer(STATUS)}, 1)
    assert [found.error for found in shown.servers] == ["no status of LAPS", ""]
    assert draw(shown)


def test_table_lists_slowest_requests_of_all_servers() -> None:
    one = Answer(STATUS, recent=(Seen("a", 5.0), Seen("b", 3.0)))
    other = Answer(STATUS, recent=(Seen("c", 4.0, "long", causes={"memory": 1.0, "behind_long": 3.0}),))
    shown = table({"one": one, "other": other}, 2)
    assert [(s.url, s.rid, s.mostly) for s in shown.slowest] == [
        ("one", "a", "unknown 100%"),
        ("other", "c", "behind long 75%"),
    ]


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        (FakeServer(key="geheim"), "needs the key (--api-key)"),
        (FakeServer(status=b"<html>"), "no answer: JSON is malformed"),
        (FakeServer(status=b"[" * 100_000), "no answer: maximum recursion depth"),
        (FakeServer(status=[1]), "no status of LAPS"),
        (FakeServer(redirect="http://127.0.0.1:9/"), "HTTP 302"),
        (FakeServer(status={"enabled": False, "reason": "it decodes"}), "LAPS is off: it decodes"),
    ],
)
def test_row_explains_unusable_answer(fake: FakeServer, said: str) -> None:
    with serve(fake):
        assert row(fake.url, Server(fake.url).ask()).error.startswith(said)


def test_row_reports_refused_connection() -> None:
    assert row("u", Server("127.0.0.1:9").ask()).error == "no answer: Connection refused"


def test_receipts_are_requested_incrementally_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("laps_top.ask.time.monotonic", lambda: clock[0])
    old = {**receipt("old", "short", 1000.0), "arrived_s": 80.0}
    with serve(FakeServer(receipts=[old, {**receipt("new", "short", 1000.0), "arrived_s": 100.0}])) as fake:
        server = Server(fake.url)

        def known() -> list[str]:
            recent = server.ask().recent
            assert recent is not None
            return sorted(r.rid for r in recent)

        assert known() == ["new", "old"]
        fake.receipts = []
        clock[0] += 9.5
        assert known() == ["new", "old"]
        clock[0] += 1.0
        assert known() == ["new"], "it ended 20 s before the newest"
        clock[0] += 20.0
        assert known() == []
        assert fake.seconds == ["30", "11", "2", "21"]


def test_key_is_sent_and_missing_receipts_are_rarely_requested() -> None:
    with serve(FakeServer(key="geheim")) as fake:
        server = Server(fake.url, "geheim")
        for _ in range(3):
            assert server.ask().recent is None
        assert fake.asked == ["/laps_status", "/laps_receipts", "/laps_status", "/laps_status"]
        assert set(fake.keys) == {"Bearer geheim"}


def test_once_prints_table_or_one_json_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b[31m[bold]red"
    with serve(FakeServer(key="geheim", receipts=[receipt(evil, "long", 812.0, "whale")])) as fake:
        monkeypatch.setenv(command.KEY, "geheim")
        assert command.main(["--once", fake.url]) == 0
        text = capsys.readouterr().out
        line = re.search(rf"^ ?{fake.url}.*$", text, re.MULTILINE)
        assert line
        for cell in ("prefill", "3 / 1", "1,500 ms", "75%", "812 / 812 ms", "42", "5%", "100,000", "ok"):
            assert cell in line[0]
        assert "?[31m[bold]red" in text
        assert "whale" in text
        assert "\x1b" not in text
        assert command.main(["--once", "--json", fake.url, "127.0.0.1:9"]) == 1
        (said,) = capsys.readouterr().out.splitlines()
        found = json.loads(said)
        assert [s.get("error") for s in found["servers"]] == [None, "no answer: Connection refused"]
        assert found["slowest"][0] | {"url": ""} == {
            **{"url": "", "rid": evil, "class": "long", "ttft_ms": 812.0},
            **{"mostly": "behind long 75%", "behind": "whale"},
        }


@pytest.mark.parametrize(
    "argv", [[], ["ftp://x"], ["x", "--interval", "0"], ["x", "--timeout", "nan"], ["x", "--slowest", "-1"]]
)
def test_invalid_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err


def _own_terminal(fd: int) -> None:
    """Make ``fd`` the controlling terminal and ignore SIGINT, as in a background job: Ctrl-C must work even then."""
    os.close(os.open(os.ttyname(fd), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_live_view_runs_in_terminal_until_key_press(key: str) -> None:
    with serve(FakeServer(receipts=[receipt("r", "short", 5.0)])) as fake:
        ours, theirs = pty.openpty()
        try:
            argv = [sys.executable, "-m", "laps_top", "--interval", "0.1", fake.url]
            process = subprocess.Popen(
                argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
                preexec_fn=lambda: os.close(os.open(os.ttyname(theirs), os.O_RDWR)),
            )  # fmt: skip
            os.close(theirs)
            shown, until = b"", time.monotonic() + 180
            while (len(fake.asked) < 6 or b"3 / 1" not in shown) and time.monotonic() < until:
                if select.select([ours], [], [], 0.1)[0]:
                    shown += os.read(ours, 65536)
            assert b"3 / 1" in shown
            os.write(ours, key.encode())
            # Read all output, even if the process has ended meanwhile.
            while time.monotonic() < until:
                if select.select([ours], [], [], 0.1)[0]:
                    try:
                        shown += os.read(ours, 65536)
                    except OSError:  # the terminal is closed
                        break
            assert process.wait(60) == 0
            assert b"Traceback" not in shown
            # The screen is restored: normal buffer, visible cursor.
            assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
            assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
        finally:
            os.close(ours)


def test_api_key_variable_matches_laps_plan() -> None:
    assert command.KEY == asking.KEY
