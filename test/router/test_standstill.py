"""A router that stood still, alone or with its machine, does not blame the servers for it."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import aiohttp.connector
import pytest
from sglang_router_laps.servers import health, upstream
from yarl import URL

from .fakes import NO_PROBES, SHORT, FakeDecode, events_of, stack

STOOD_S = 3.0


def test_stream_survives_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stream may pause for this share of the time limit: longer than it does here, shorter than the standstill.
    monkeypatch.setattr(health, "SILENCE", 2.5 / 120)

    async def run() -> None:
        make_decode = partial(FakeDecode, chunks=8, pause_s=0.1)
        async with stack(2, args={"request_timeout_secs": 120, **NO_PROBES}, make_decode=make_decode) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                await r.content.readline()
                # Router and servers share this thread.
                time.sleep(STOOD_S)
                events = await events_of(r)
            assert (json.loads(events[-2])["text"], events[-1]) == ("t7", "[DONE]")
            assert (await s.status())["counts"]["failed"] == 0

    asyncio.run(run())


def test_connections_that_time_out_in_standstill_make_no_server_unhealthy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Longer than a connection takes here, shorter than the standstill.
    monkeypatch.setattr(upstream, "CONNECT_S", 2.0)
    happy_eyeballs = vars(aiohttp.connector)["aiohappyeyeballs"]
    connect, tried, timed_out = happy_eyeballs.start_connection, 0, 0

    async def run() -> None:
        async with stack(2, args={"health_failure_threshold": 1, **NO_PROBES}) as s:
            ports = {URL(i.url).port for i in s.lb.instances}

            async def start_connection(addr_infos: Any, **more: Any) -> Any:
                nonlocal tried, timed_out
                if addr_infos[0][4][1] in ports:
                    tried += 1
                    if tried == 8:
                        asyncio.get_running_loop().call_soon(time.sleep, STOOD_S)
                    try:
                        await asyncio.sleep(0.2)
                    except asyncio.CancelledError:
                        timed_out += 1
                        raise
                return await connect(addr_infos, **more)

            monkeypatch.setattr(happy_eyeballs, "start_connection", start_connection)
            async with asyncio.timeout(120):
                replies = await asyncio.gather(*(s.post(text=SHORT) for _ in range(8)))
            assert timed_out >= 3
            assert [status for status, _ in replies] == [200] * 8
            assert "unhealthy" not in caplog.text

    asyncio.run(run())
