"""--router-workers: several processes behind one port, real ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sglang_router_laps.http.siblings import merged

from .fakes import SHORT, Stack, stack
from .test_aborts import StrictDecode, StrictPrefill
from .test_own_limits import separate_router
from .test_stock_flags import certificate

N = 2


@contextlib.asynccontextmanager
async def workers(tmp: Path, *more: str, **fakes: Any) -> AsyncIterator[tuple[Stack, int, str]]:
    """Fakes, the pid of a router's parent process and its URL."""
    flags = "--router-workers", str(N), "--shutdown-grace-period-secs", "20", *more
    async with stack(2, **fakes) as s, separate_router(s, None, tmp, *flags) as (pid, url):
        yield s, pid, url


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.05)


async def connected(url: str, index: int) -> tuple[aiohttp.ClientSession, int]:
    """A client whose one connection leads to this worker, and the worker's pid."""
    async with asyncio.timeout(120):
        while True:
            client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1, ssl=False))
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{url}/laps_status") as r:
                    found = (await r.json())["router_worker"]
                    assert found["of"] == N
                    if found["index"] == index:
                        return client, int(found["pid"])
            await client.close()


async def requests_told(client: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Short requests by worker, as /metrics has them."""
    async with client.get(f"{url}/metrics") as r:
        text = await r.text()
    return {
        sample.labels["router_worker"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "laps_router_requests_total" and sample.labels["class"] == "short"
    }


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        # What has ended stays until its parent has looked, if that is another process than this one.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("tls", [False, True])
def test_workers_share_a_port_and_each_tells_the_numbers_of_all(tls: bool, tmp_path: Path) -> None:
    files = zip(("--tls-cert-path", "--tls-key-path"), map(str, certificate(tmp_path)), strict=True) if tls else ()

    async def run() -> None:
        async with workers(tmp_path, *(word for pair in files for word in pair)) as (s, _, url):
            assert url.startswith("https://") == tls
            # A connection that rests, or whose answer was not read, is closed: the next may lead to another worker.
            for i, times in enumerate((1, 3)):
                async with (await connected(url, i))[0] as client:
                    for _ in range(times):
                        async with client.post(f"{url}/generate", json={"text": SHORT}) as r:
                            await r.read()
                            assert r.status == 200
            for i in range(N):
                async with (await connected(url, i))[0] as client:
                    assert await requests_told(client, url) == {"0": 1.0, "1": 3.0}
                    async with client.post(f"{url}/flush_cache") as r:
                        await r.read()
                        assert r.status == 200
            assert [f.flushed for f in s.prefills] == [N] * 2, "by the one that was asked alone"

    asyncio.run(run())


def test_an_abort_reaches_the_worker_that_has_the_request(tmp_path: Path) -> None:
    async def run() -> None:
        fakes = {"make_prefill": StrictPrefill, "make_decode": StrictDecode}
        async with workers(tmp_path, **fakes) as (s, _, url):
            one, other = [(await connected(url, i))[0] for i in range(N)]
            for p in s.prefills:
                p.gate.clear()
            held = asyncio.create_task(one.post(f"{url}/generate", json={"text": SHORT, "rid": "mine"}))
            await until(lambda: s.decodes[0].running == 1 and sum(p.running for p in s.prefills) == 1)
            async with other.post(f"{url}/abort_request", json={"rid": "mine"}) as r:
                assert r.status == 200
            async with await held as r:
                # The decode server's word: its own router has asked for the end.
                assert (r.status, (await r.json())["meta_info"]["finish_reason"]["type"]) == (200, "abort")
            before = [len(f.aborted) for f in (*s.prefills, *s.decodes)]
            async with other.post(f"{url}/abort_request", json={"rid": "unknown"}) as r:
                assert r.status == 200
            # Once each, and one of each role is asked whether the client may.
            told = [len(f.aborted) - n for f, n in zip((*s.prefills, *s.decodes), before, strict=True)]
            assert sorted(told) == [1, 2, 2]
            # Nobody passes for one of them.
            async with other.post(f"{url}/flush_cache", headers={"x-laps-router-worker": "1"}) as r:
                assert r.status == 200
            assert [f.flushed for f in s.prefills] == [1, 1]
            for client in (one, other):
                await client.close()

    asyncio.run(run())


def test_any_worker_says_that_another_one_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        async with workers(tmp_path) as (_, _, url):
            client, hung = await connected(url, 1)
            other, _ = await connected(url, 0)
            for stop, said in (
                (False, (200, "alive")),
                (True, (503, "worker 1 does not answer")),
                (False, (200, "alive")),
            ):
                os.kill(hung, signal.SIGSTOP if stop else signal.SIGCONT)
                async with other.get(f"{url}/liveness") as r:
                    assert (r.status, await r.text()) == said
            for c in (client, other):
                await c.close()

    asyncio.run(run())


HANGS = """
import os, time
from sglang_router_laps.processes import Processes
def serve(index, beat):
    os.write(1, f"{index} {os.getpid()}\\n".encode())  # at once: others write there, too
    while True:
        if index == 0 or os.path.exists("mended"):
            beat()
        time.sleep(0.1)
Processes([[], []], serve, hung_s=6.0).run()
"""


def test_a_worker_that_hangs_is_replaced_and_no_other(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", HANGS], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        seen = [parent.stdout.readline().split() for _ in range(3)]
        assert sorted(index for index, _ in seen) == ["0", "1", "1"], seen
        hung, again = (int(pid) for index, pid in seen if index == "1")
        assert hung != again
        assert not alive(hung)
        (tmp_path / "mended").touch()
    finally:
        parent.terminate()
        rest = parent.communicate(timeout=60)[0]
    assert "0" not in rest.split()


def test_a_worker_that_dies_is_started_again_and_all_end_with_their_parent(tmp_path: Path) -> None:
    async def run() -> None:
        async with workers(tmp_path) as (s, parent, url):
            client, pid = await connected(url, 1)
            os.kill(pid, signal.SIGKILL)
            await client.close()
            # Nobody who connects meanwhile is turned away.
            for _ in range(20):
                async with aiohttp.ClientSession() as new, new.post(f"{url}/generate", json={"text": SHORT}) as r:
                    assert r.status == 200
            client, again = await connected(url, 1)
            assert again != pid
            other, first = await connected(url, 0)
            # Asked to end, it lets requests finish.
            for p in s.prefills:
                p.gate.clear()
            held = asyncio.create_task(client.post(f"{url}/generate", json={"text": SHORT}))
            await until(lambda: sum(p.running for p in s.prefills) == 1)
            os.kill(parent, signal.SIGTERM)
            await until(lambda: not alive(first))
            for p in s.prefills:
                p.gate.set()
            async with await held as r:
                assert r.status == 200
            await until(lambda: not (alive(again) or alive(parent)))
            for c in (client, other):
                await c.close()
            assert b"worker 1 has ended (-9); restarting it" in (tmp_path / "router.log").read_bytes()

    asyncio.run(run())


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    async def run() -> None:
        async with workers(tmp_path) as (_, parent, url):
            both = [await connected(url, i) for i in range(N)]
            os.kill(parent, signal.SIGKILL)
            await until(lambda: not any(alive(pid) for _, pid in both))
            for client, _ in both:
                await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_that_is_taken_is_one_line_and_exit_1(shared: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=shared) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "sglang_router_laps.launch_router", "--mini-lb", "--pd-disaggregation",
             "--enable-laps-alloc", "--router-workers", "2", "--host", "127.0.0.1", "--port", port, "--log-level",
             "error", "--prefill", "http://127.0.0.1:1", "1", "--prefill", "http://127.0.0.1:2", "1",
             "--decode", "http://127.0.0.1:3"],
            capture_output=True, text=True, timeout=170,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"error: --port: 127.0.0.1:{port}: Address already in use\n"


def test_metrics_of_several_are_one_page() -> None:
    one = b'# HELP a_total A\n# TYPE a_total counter\na_total{x="{1}"} 1.0\na_total 2.0\n'
    one += b"# HELP b B\n# TYPE b gauge\nb 3.0\n"
    page = merged({0: one, 2: one}).decode()
    assert page.count("# HELP") == page.count("# TYPE") == 2
    found = {
        (sample.name, tuple(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert found == {
        sample
        for i in "02"
        for sample in (
            ("a_total", (("router_worker", i), ("x", "{1}")), 1.0),
            ("a_total", (("router_worker", i),), 2.0),
            ("b", (("router_worker", i),), 3.0),
        )
    }
