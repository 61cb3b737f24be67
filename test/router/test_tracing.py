"""Traces of requests: spans with --enable-trace, and the error if the packages for it are not installed."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest
from sglang_router import mini_lb
from sglang_router_laps import tracing
from sglang_router_laps.cli import make_balancer
from sglang_router_laps.http.app import LapsApp
from sglang_router_laps.tracing import Tracer

from .fakes import SHORT, serving, stack
from .test_args import parse
from .test_stock_flags import LAPS

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_missing_trace_packages_exit_2_with_one_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(tracing, "find_spec", lambda name: None if name.startswith("opentelemetry") else real(name))
    with pytest.raises(SystemExit) as e:
        make_balancer(parse(*LAPS, "--enable-trace"))
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --enable-trace: needs opentelemetry")
    assert err.count("\n") == 1


def test_request_spans_join_client_trace_and_reach_servers() -> None:
    export: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="extra: trace")

    async def run() -> None:
        exporter = export.InMemorySpanExporter()
        async with stack(2, args={"max_concurrent_requests": 1}) as s:
            config = s.balancer.server_config()
            config.app = LapsApp(s.lb, mini_lb.app, Tracer(exporter))
            config.host, config.port = "127.0.0.1", 0
            for p in s.prefills:
                p.gate.clear()
            async with serving(config) as port:
                url = f"http://127.0.0.1:{port}/generate"
                headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}

                async def one(stream: bool) -> int:
                    async with s.client.post(url, json={"text": SHORT, "stream": stream}, headers=headers) as r:
                        await r.read()
                        return r.status

                both = [asyncio.create_task(one(False))]
                await s.until(lambda: s.lb.queue.in_flight == 1)
                both.append(asyncio.create_task(one(True)))
                await s.until(lambda: s.lb.queue.waiting == 1)
                for p in s.prefills:
                    p.gate.set()
                assert await asyncio.gather(*both) == [200, 200]
                await s.at_rest()
            told = {h["traceparent"] for f in (*s.prefills, *s.decodes) for h in f.headers}
        spans = exporter.get_finished_spans()
        assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
        names = [span.name for span in spans]
        assert sorted(names) == ["POST /generate"] * 2 + ["first token"] * 2 + ["prefill"] * 2 + ["queue"]
        outer = {span.context.span_id: span for span in spans if span.name == "POST /generate"}
        assert {f"{span.parent.span_id:016x}" for span in outer.values()} == {PARENT}
        assert told == {f"00-{TRACE}-{i:016x}-01" for i in outer}
        for span in spans:
            within = outer.get(span.parent.span_id, span)
            assert within.start_time <= span.start_time <= span.end_time <= within.end_time
        for span in outer.values():
            assert span.attributes["http.response.status_code"] == 200
            assert span.attributes["laps.class"] == "short"
            assert span.attributes["laps.prefill"] in {p.url for p in s.prefills}

    asyncio.run(run())


def test_client_trace_is_forwarded_without_trace_flag() -> None:
    async def run() -> None:
        async with stack(2) as s:
            parent = f"00-{TRACE}-{PARENT}-01"
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers={"traceparent": parent}) as r:
                assert r.status == 200
            assert s.decodes[0].headers[0]["traceparent"] == parent

    asyncio.run(run())
