"""Sources of load signals, and the reaction of the control task, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from laps_core.pools.controller import PoolController

from .fakes import FakePrefill, World, stack


class StockPrefill(FakePrefill):
    """Stock server: no /laps_status, but /v1/loads or /metrics if given."""

    def __init__(self, world: World, loads: dict[str, Any] | None = None, metrics: str | None = None) -> None:
        super().__init__(world, laps=False)
        self.loads, self.metrics, self.asked = loads, metrics, 0

    def add_routes(self, app: web.Application) -> None:
        super().add_routes(app)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/metrics", self._metrics)

    async def _loads(self, request: web.Request) -> web.Response:
        if self.loads is None:
            raise web.HTTPNotFound
        assert request.query["include"] == "core"
        return web.json_response(self.loads)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics)


def test_load_of_laps_server_is_read_from_laps_status() -> None:
    async def run() -> None:
        async with stack(2, config={"interval_s": 0.2}) as s:
            s.prefills[0].load = {"backlog_tokens": 4096, "slo_deviation": 0.5, "busy_share": 0.25}
            reader = s.lb.readers[0]
            # A poll that takes long lets the last load age meanwhile.
            status = await s.status_when(lambda found: found["prefill"][0]["signals"]["backlog_tokens"] == 4096)
            found = status["prefill"][0]
            assert found["signals"] == {
                "backlog_tokens": 4096,
                "slo_deviation": 0.5,
                "busy_share": 0.25,
                "source": "laps_status",
            }
            assert found["pressure"] == pytest.approx(2.0 + 0.5 - 0.05)
            assert reader.instance.outlook.parks

    asyncio.run(run())


def test_load_of_stock_server_is_read_from_v1_loads() -> None:
    ranks = [{"num_waiting_uncached_tokens": n, "total_prefill_busy_us": 0} for n in (100, 23)]
    loads = iter([{"loads": ranks}, None])

    async def run() -> None:
        async with stack(
            2, config={"interval_s": 0.2}, make_prefill=lambda world: StockPrefill(world, next(loads))
        ) as s:
            await s.until(lambda: s.lb.readers[0].source == "v1/loads")
            await s.until(lambda: s.lb.readers[0].load.backlog_tokens == 123)
            assert s.lb.readers[1].source == "router"
            assert not any(r.instance.outlook.parks for r in s.lb.readers)

    asyncio.run(run())


def test_stock_server_load_falls_back_to_queue_length_metric() -> None:
    metrics = '# HELP x\nsglang:num_queue_reqs{model_name="m",tp_rank="0"} 3.0\n'

    async def run() -> None:
        async with stack(
            2, config={"interval_s": 0.2}, make_prefill=lambda world: StockPrefill(world, metrics=metrics)
        ) as s:
            await s.post(text="a" * 400)
            short = next(r for r in s.lb.readers if r.instance.pool == "short")
            await s.until(lambda: short.source == "metrics" and short.load.backlog_tokens > 0)
            assert short.load.backlog_tokens == 3 * 100

    asyncio.run(run())


def test_load_of_silent_server_is_taken_from_router_counts() -> None:
    async def run() -> None:
        async with stack(2, config={"interval_s": 0.2}, make_prefill=StockPrefill) as s:
            s.pool("short")[0].gate.clear()
            waiting = asyncio.create_task(s.post(text="a" * 400))
            reader = next(r for r in s.lb.readers if r.instance.pool == "short")
            await s.until(lambda: reader.load.backlog_tokens == 100 and reader.load.busy_share > 0.9)
            assert reader.source == "router"
            s.pool("short")[0].gate.set()
            await waiting
            await s.until(lambda: reader.load.backlog_tokens == 0)

    asyncio.run(run())


def test_pressure_moves_server_and_requests_in_flight_finish() -> None:
    async def run() -> None:
        async with stack(4, config={"interval_s": 0.4, "spill": "off"}) as s:
            moving = s.pool("long")
            for p in moving:
                p.gate.clear()
            held = [asyncio.create_task(s.post(text=f"{i}" * 8000)) for i in range(2)]
            await s.until(lambda: sum(len(p.bodies) for p in moving) == 2)
            for p in s.pool("short"):
                p.load = {"backlog_tokens": 40_000, "slo_deviation": 0.0, "busy_share": 1.0}
            for p in moving:
                p.load = {"backlog_tokens": 0, "slo_deviation": 0.0, "busy_share": 0.0}
            await s.until(lambda: len(s.pool("short")) == 3)
            for p in moving:
                p.gate.set()
            assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
            await s.at_rest()
            found = await s.status()
            assert found["counts"]["moves"] == {"short": 1, "long": 0, "both": 0}
            (move,) = found["migrations"]
            assert (move["from"], move["to"]) == ("long", "short")
            assert "pressure" in move["reason"]
            # n_min: the last server of the long pool stays at any pressure.
            await asyncio.sleep(1.0)
            assert len(s.pool("long")) == 1

    asyncio.run(run())


def test_flush_cache_clears_prefix_index() -> None:
    async def run() -> None:
        async with stack(2) as s:
            await s.post(text="z" * 8000)
            assert any(len(i.prefixes) for i in s.lb.pools.instances)
            async with s.client.post(f"{s.url}/flush_cache") as r:
                assert r.status == 200
            assert not any(len(i.prefixes) for i in s.lb.pools.instances)
            assert [f.flushed for f in (*s.prefills, *s.decodes)] == [1] * 3

    asyncio.run(run())


def test_flush_reports_refusal_but_ignores_stopped_server() -> None:
    async def run() -> None:
        async with stack(2) as s:
            s.prefills[1].flush_status = 400
            async with s.client.post(f"{s.url}/flush_cache") as r:
                assert r.status == 400
            await s.prefills[1].stop()
            async with s.client.post(f"{s.url}/flush_cache") as r:
                assert r.status == 200

    asyncio.run(run())


def test_infinite_metric_value_is_ignored() -> None:
    made: list[StockPrefill] = []

    def lying(world: World) -> StockPrefill:
        made.append(StockPrefill(world, metrics='sglang:num_queue_reqs{a="b"} 1e999\n'))
        return made[-1]

    async def run() -> None:
        async with stack(2, config={"interval_s": 0.2}, make_prefill=lying) as s:
            reader = s.lb.readers[0]
            with reader.instance.lease(100):
                await s.until(lambda: made[0].asked > 0 and reader.load.backlog_tokens == 100)
                assert (await s.status())["prefill"][0]["signals"]["source"] == "router"

    asyncio.run(run())


def test_slow_server_keeps_last_load_and_gets_single_query() -> None:
    """A server whose answers take longer than the period does not count as idle and gets one query at a time."""
    made: list[SlowPrefill] = []

    def slow(world: World) -> SlowPrefill:
        made.append(SlowPrefill(world))
        return made[-1]

    async def run() -> None:
        async with stack(2, config={"interval_s": 0.2}, make_prefill=slow) as s:
            reader, server = s.lb.readers[0], made[0]
            server.load = {"backlog_tokens": 1e6, "slo_deviation": 0.0, "busy_share": 1.0}
            await s.until(lambda: reader.load.backlog_tokens == 1e6)
            server.answers.clear()
            await s.until(lambda: server.waiting == 1)
            beats = len(s.lb.journal.samples)
            await s.until(lambda: len(s.lb.journal.samples) >= beats + 5)
            assert (reader.load.busy_share, reader.source, server.waiting) == (1.0, "laps_status", 1)
            assert reader.load.backlog_tokens > 0
            server.load = {"backlog_tokens": 5e6, "slo_deviation": 0.0, "busy_share": 1.0}
            server.answers.set()
            await s.until(lambda: reader.load.backlog_tokens == 5e6)

    asyncio.run(run())


def test_server_with_errors_for_short_time_keeps_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with stack(2, config={"interval_s": 0.2}, make_prefill=BrokenPrefill) as s:
            reader, server = s.lb.readers[0], s.prefills[0]
            assert isinstance(server, BrokenPrefill)
            await s.until(lambda: reader.source == "laps_status")
            server.broken = True
            await s.until(lambda: server.refused >= 5)
            assert (reader.source, reader.instance.outlook.parks) == ("laps_status", True)
            # After a minute another route is tried.
            monkeypatch.setattr("sglang_router_laps.servers.reader.RETRY_S", 0.0)
            await s.until(lambda: reader.source == "router")

    asyncio.run(run())


class BrokenPrefill(FakePrefill):
    """Prefill server that answers /laps_status with 502 while ``broken``."""

    broken = False

    async def _laps_status(self, request: web.Request) -> web.Response:
        if self.broken:
            self.refused += 1
            raise web.HTTPBadGateway
        return await super()._laps_status(request)


class SlowPrefill(FakePrefill):
    """Prefill server that answers /laps_status only while ``answers`` is set."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.answers, self.waiting = asyncio.Event(), 0
        self.answers.set()

    async def _laps_status(self, request: web.Request) -> web.Response:
        self.waiting += 1
        await self.answers.wait()
        self.waiting -= 1
        return await super()._laps_status(request)


def test_failed_controller_beat_is_reported_and_next_beat_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    step, broken = PoolController.step, True

    def fails(self: PoolController, *told: Any) -> Any:
        if broken:
            raise ArithmeticError("less than nothing")
        return step(self, *told)

    monkeypatch.setattr(PoolController, "step", fails)

    async def run() -> None:
        nonlocal broken
        async with stack(2, config={"interval_s": 0.2}) as s:
            await s.until(lambda: s.lb.counts.failed_beats >= 3)
            s.prefills[0].load = {"backlog_tokens": 77, "slo_deviation": 0.0, "busy_share": 0.0}
            await s.until(lambda: s.lb.readers[0].load.backlog_tokens == 77)
            found = await s.status()
            (task,) = (t for t in found["tasks"] if t["name"] == "controller")
            assert (task["alive"], task["restarts"]) == (True, 0)
            assert task["error"] == "ArithmeticError: less than nothing"
            assert found["counts"]["failed_beats"] >= 3
            async with s.client.get(f"{s.url}/metrics") as r:
                assert "laps_router_failed_beats_total" in await r.text()
            broken = False
            await s.until(lambda: len(s.lb.journal.samples) > 3)

    asyncio.run(run())
