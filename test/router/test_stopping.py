"""A router that is stopped while requests are in flight."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path

from .fakes import SHORT, FakeDecode, events_of, stack
from .test_connections import connection
from .test_own_limits import separate_router

FLAGS = ("--shutdown-grace-period-secs", "1", "--max-concurrent-requests", "2")
HALF = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"


def test_requests_that_outlast_the_grace_period_end_with_503(tmp_path: Path) -> None:
    async def run() -> None:
        endless = partial(FakeDecode, chunks=100_000, pause_s=0.05)
        async with stack(1, make_decode=endless) as s, separate_router(s, None, tmp_path, *FLAGS) as (pid, url):

            async def whole() -> tuple[int, str, str]:
                async with s.client.post(f"{url}/generate", json={"text": SHORT}) as r:
                    return r.status, r.headers["retry-after"], (await r.json())["error"]["type"]

            async with (
                s.client.post(f"{url}/generate", json={"text": SHORT, "stream": True}) as stream,
                connection(url) as (reader, writer),
            ):
                # The second one is served, too, and the third one waits.
                others = [asyncio.create_task(whole()) for _ in range(2)]
                writer.write(HALF)
                await s.until(lambda: s.decodes[0].running == 2)
                os.kill(pid, signal.SIGTERM)
                assert json.loads((await events_of(stream))[-1])["error"]["type"] == "stopping"
                assert await asyncio.gather(*others) == [(503, "1", "stopping")] * 2
                assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            await s.until(lambda: len(s.decodes[0].aborted) == 2)
            assert "Traceback" not in (tmp_path / "router.log").read_text()

    asyncio.run(run())
