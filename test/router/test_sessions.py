"""Sessions over HTTP, by header or in the body; the reply says why a server was chosen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .fakes import SHORT, Body, stack

LONG = "word " * 4000


@pytest.mark.parametrize("how", ["x-smg-routing-key", "x-session-id", "session_params", None])
def test_session_requests_go_to_same_server(how: str | None) -> None:
    async def ask(s: Any, name: str, text: str) -> str:
        body: Body = {"text": text}
        headers = {}
        if how == "session_params":
            body["session_params"] = {"session_id": name}
        elif how is not None:
            headers[how] = name
        async with s.client.post(f"{s.url}/generate", json=body, headers=headers) as r:
            assert r.status == 200
            await r.read()
            return str(r.headers["x-laps-decision"])

    async def run() -> None:
        async with stack(4, 1) as s:
            said = [[await ask(s, f"{name}", f"{name}{turn} {SHORT}") for turn in range(5)] for name in range(4)]
            await s.at_rest()
        if how is None:
            assert "session" not in {word for words in said for word in words}
            return
        assert [words[0] == "session" for words in said] == [False] * 4
        assert all(words[1:] == ["session"] * 4 for words in said)
        where = [{b["text"][0] for b in p.bodies} for p in s.prefills]
        assert sum(map(len, where)) == 4, "each session at one server"

    asyncio.run(run())


def test_decision_header_of_stream_reports_retry() -> None:
    async def run() -> None:
        async with stack(2, 1, args={"retry_initial_backoff_ms": 1}) as s:
            headers = {"x-session-id": "a"}
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers=headers) as r:
                assert r.headers["x-laps-decision"] in ("expected", "pool")
            held = next(p for p in s.prefills if p.bodies)
            await held.stop()
            body = {"text": SHORT, "stream": True}
            async with s.client.post(f"{s.url}/generate", json=body, headers=headers) as r:
                assert r.status == 200
                assert r.headers["x-laps-decision"] == "retry"
                await r.read()
            async with s.client.get(f"{s.url}/laps_status") as r:
                assert "x-laps-decision" not in r.headers
            await s.at_rest()

    asyncio.run(run())
