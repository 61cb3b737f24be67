"""Operation of the router: probes, ids, access log, keys, TLS to the servers, counters by server."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import ssl
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from sglang_router_laps.balancer import Server

from .fakes import LONG, NO_PROBES, PROBES, SHORT, Body, FakePrefill, Stack, entry, serving, stack
from .test_stock_flags import certificate

ACCESS = "sglang_router_laps.request.trail"


async def probe(s: Stack, path: str) -> int:
    async with s.client.get(f"{s.url}/{path}") as r:
        return r.status


def test_readiness_follows_server_health_and_sigterm() -> None:
    async def run() -> None:
        async with stack(2, 1, args=PROBES) as s:
            await s.until(s.lb.ready)
            assert (await probe(s, "readiness"), await probe(s, "liveness")) == (200, 200)
            (decoder,) = s.decodes
            decoder.healthy = False
            await s.until(lambda: not s.lb.decoders[0].healthy)
            assert (await probe(s, "readiness"), await probe(s, "liveness")) == (503, 200)
            decoder.healthy = True
            await s.until(s.lb.ready)
            assert (await probe(s, "readiness"), (await s.status())["ready"]) == (200, True)
            Server(s.balancer.server_config(), s.lb).handle_exit(signal.SIGTERM, None)
            assert (await probe(s, "readiness"), await probe(s, "liveness")) == (503, 200)

    asyncio.run(run())


def test_router_is_not_ready_with_unreachable_decode_server() -> None:
    async def run() -> None:
        async with stack(2, 0, more_decodes=["http://127.0.0.1:9"], args=PROBES) as s:
            await s.until(lambda: all(i.proven for i in s.lb.pools.instances) and not s.lb.decoders[0].healthy)
            assert await probe(s, "readiness") == 503

    asyncio.run(run())


@pytest.mark.parametrize(
    ("args", "sent", "back"),
    [
        ({}, {"x-request-id": "r-1"}, "r-1"),
        ({}, {"request-id": "r-3", "x-trace-id": "r-2"}, "r-2"),
        ({"request_id_headers": ["X-Mine"]}, {"x-mine": "r-4", "x-request-id": "r-5"}, "r-4"),
        ({}, {"x-request-id": "two words"}, None),
        ({}, {}, None),
    ],
)
def test_every_answer_has_request_id_header(args: Body, sent: dict[str, str], back: str | None) -> None:
    async def run() -> None:
        async with stack(2, args=args) as s:
            ask: list[tuple[str, str, Any]] = [
                ("POST", "generate", {"text": SHORT}),
                ("POST", "generate", {"text": SHORT, "stream": True}),
                ("POST", "generate", {"text": ""}),
                ("POST", "abort_request", {}),
                ("GET", "health", None),
                ("GET", "laps_status", None),
                ("GET", "nowhere", None),
            ]
            for method, path, body in ask:
                async with s.client.request(method, f"{s.url}/{path}", json=body, headers=sent) as r:
                    (said,) = r.headers.getall("x-request-id")
                    assert said == back if back else re.fullmatch("[0-9a-f]{32}", said)

    asyncio.run(run())


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """Return the fields of each line of the access log."""
    said = [line for r in caplog.records if r.name == ACCESS for line in r.getMessage().splitlines()]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z id=", line) for line in said)
    return [dict(field.split("=", 1) for field in line.split()[1:]) for line in said]


def test_access_log_has_one_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=ACCESS)

    async def run() -> None:
        async with stack(2, args={"max_concurrent_requests": 1, "queue_size": 1}) as s:
            for p in s.prefills:
                p.gate.clear()
            first = asyncio.create_task(s.post(text=SHORT, rid="a b\n"))
            await s.until(lambda: s.lb.queue.in_flight == 1)
            second = asyncio.create_task(s.post("v1/completions", prompt=LONG, stream=False))
            await s.until(lambda: s.lb.queue.waiting == 1)
            assert (await s.post(text=SHORT))[0] == 429
            for p in s.prefills:
                p.gate.set()
            await asyncio.gather(first, second)
            await s.at_rest()
            await s.until(lambda: len(lines(caplog)) == 3)
            full, one, two = lines(caplog)
            urls = {f.url for f in (*s.prefills, *s.decodes)}
            assert (full["status"], full["prefill"], full["first_ms"]) == ("429", "-", "-")
            assert (one["class"], one["status"], one["queue_ms"]) == ("short", "200", "0")
            assert [one["rid"], two["rid"]] == [b["rid"] for b in s.decodes[0].bodies]
            assert (two["route"], two["class"], two["retries"]) == ("/v1/completions", "long", "0")
            assert two["rid"] == two["id"]
            for line in (one, two):
                assert {line["prefill"], line["decode"]} <= urls
                assert 0 < float(line["prefill_ms"]) <= float(line["total_ms"])
                assert 0 < float(line["first_ms"]) <= float(line["total_ms"])
            assert float(two["queue_ms"]) > 0

    asyncio.run(run())


def test_access_log_records_retries_and_client_disconnects(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=ACCESS)

    async def run() -> None:
        async with stack(2, 2, args=NO_PROBES) as s:
            await s.decodes[0].stop()
            for _ in range(2):
                assert (await s.post(text=SHORT))[0] == 200
            await s.at_rest()
            for p in s.prefills:
                p.gate.clear()
            async with aiohttp.ClientSession() as client:
                gone = asyncio.create_task(client.post(f"{s.url}/generate", json={"text": SHORT}))
                await s.until(lambda: s.lb.queue.in_flight == 1)
                gone.cancel()
            await s.until(lambda: len(lines(caplog)) == 3)
            assert sum(int(line["retries"]) for line in lines(caplog)) == 1
            assert lines(caplog)[-1]["status"] == "499"
            for p in s.prefills:
                p.gate.set()

    asyncio.run(run())


def test_warning_log_level_disables_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger=ACCESS)

    async def run() -> None:
        async with stack(2) as s:
            assert (await s.post(text=SHORT))[0] == 200
        assert not lines(caplog)

    asyncio.run(run())


def test_status_and_page_require_api_key_unlike_probes() -> None:
    async def run() -> None:
        async with stack(2, args={"api_key": "geheim"}) as s:
            for path in ("laps", "laps_status"):
                for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic !"}):
                    async with s.client.get(f"{s.url}/{path}", headers=headers) as r:
                        assert (r.status, r.headers["www-authenticate"][:5]) == (401, "Basic")
                for header in ("Bearer geheim", aiohttp.encode_basic_auth("me", "geheim")):
                    async with s.client.get(f"{s.url}/{path}", headers={"authorization": header}) as r:
                        assert r.status == 200
            for path in ("metrics", "health", "liveness"):
                assert await probe(s, path) == 200

    asyncio.run(run())


def test_status_and_metrics_count_answers_and_errors_per_server() -> None:
    async def run() -> None:
        async with stack(2, 2, args={**NO_PROBES, "disable_retries": True}) as s:
            for _ in range(4):
                assert (await s.post(text=SHORT))[0] == 200
            sick = s.decodes[0]
            sick.status = 500
            while not entry(await s.status(), sick)["errors"]:
                await s.post(text=SHORT)
            await s.at_rest()
            found = await s.status()
            assert entry(found, s.decodes[1])["errors"] == 0
            for server in (s.pool("short")[0], *s.decodes):
                told = entry(found, server)
                assert told["answers"] >= 2
                assert told["answers_s"] >= 0
                assert 0 <= told["latency_ms"] < 60e3
            assert entry(found, s.pool("long")[0])["latency_ms"] is None
            async with s.client.get(f"{s.url}/metrics") as r:
                said = [x for family in text_string_to_metric_families(await r.text()) for x in family.samples]
            samples = {(x.name, x.labels.get("server"), x.labels.get("role")): x.value for x in said}
            for server in (*s.prefills, *s.decodes):
                told = entry(found, server)
                assert told["errors"] == int(server is sick)
                for name, key in (("errors_total", "errors"), ("answer_seconds_count", "answers")):
                    assert samples[f"laps_router_server_{name}", server.url, server.role] == told[key]

    asyncio.run(run())


def test_model_routes_forward_404_and_return_503_without_prefill() -> None:
    async def run() -> None:
        async with stack(2, args={**NO_PROBES, "queue_size": 0}) as s:
            # The fake servers have no such route.
            assert await probe(s, "v1/models") == 404
            for p in s.prefills:
                await p.stop()
            assert await probe(s, "model_info") == 503

    asyncio.run(run())


class Described(FakePrefill):
    """Prefill server that names its model, once its gate is open."""

    def add_routes(self, app: web.Application) -> None:
        super().add_routes(app)
        app.router.add_get("/v1/models", self._models)

    async def _models(self, _: web.Request) -> web.Response:
        await self.gate.wait()
        return web.json_response({"data": []})


def test_router_asks_next_server_for_its_model_after_three_seconds() -> None:
    async def run() -> None:
        async with stack(2, args=NO_PROBES, make_prefill=Described) as s:
            s.prefills[0].gate.clear()
            begin = time.monotonic()
            async with asyncio.timeout(20):
                assert await probe(s, "v1/models") == 200
            # Timers may fire a little early.
            assert time.monotonic() - begin > 2.9
            s.prefills[0].gate.set()

    asyncio.run(run())


def test_router_presents_client_certificate_to_tls_server(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)

    async def run() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(cert))
        context.load_cert_chain(cert, key)
        context.verify_mode = ssl.CERT_REQUIRED
        async with stack(2, 1, args=NO_PROBES) as behind:
            config = behind.balancer.server_config()
            config.host, config.port, config.lifespan = "127.0.0.1", 0, "off"
            config.load()
            config.ssl = context
            # A router in front of another router, which speaks HTTPS like a server.
            async with serving(config) as port:
                known = {"ca_cert_paths": [str(cert)], "client_cert_path": str(cert), "client_key_path": str(key)}
                for args, taken in ((known, True), ({"ca_cert_paths": [str(cert)]}, False), ({}, False)):
                    router = {**NO_PROBES, **args}
                    async with stack(2, 0, more_decodes=[f"https://127.0.0.1:{port}"], args=router) as s:
                        try:
                            status, _ = await s.lb.sessions.request(s.lb.decoders[0], "health", 5.0)
                        except (aiohttp.ClientError, OSError):
                            status = 0
                        assert (status == 200) == taken

    asyncio.run(run())
