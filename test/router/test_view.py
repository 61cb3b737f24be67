"""What an operator sees: /laps_status, /metrics, and the page in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .fakes import Stack, stack

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
REPO = Path(__file__).resolve().parents[2]


async def some_traffic(s: Stack) -> None:
    for i in range(5):
        assert (await s.post(text="a" * 40))[0] == 200
        if i < 2:
            assert (await s.post(text=f"{i}" * 8000))[0] == 200
    await s.at_rest()


def test_the_status_says_what_happened() -> None:
    async def run() -> None:
        async with stack(3, 2, config={"interval_s": 0.5}) as s:
            await some_traffic(s)
            await s.until(lambda: len(s.lb.journal.samples) >= 2)
            found = await s.status()
            assert found["enabled"]
            assert [len(found["pools"][p]) for p in ("short", "long")] == [1, 2]
            assert found["counts"]["requests"] == {"short": 5, "long": 2}
            assert {p["signals"]["source"] for p in found["prefill"]} == {"laps_status"}
            for c, n in (("short", 5), ("long", 2)):
                assert found["ttft_ms"][c]["count"] == n
                assert found["ttft_ms"][c]["p50"] <= found["ttft_ms"][c]["p90"] <= found["ttft_ms"][c]["p99"]
            assert found["config"]["threshold"] == 256
            assert found["history"][0]["pools"] == ["s", "l", "l"]
            async with s.client.get(f"{s.url}/laps_status?history=1&last=1") as r:
                assert len((await r.json())["history"]) == 1
            async with s.client.get(f"{s.url}/laps_status") as r:
                assert "history" not in await r.json()

    asyncio.run(run())


def test_the_metrics_agree_with_the_status_and_the_dashboard_asks_for_nothing_else() -> None:
    async def run() -> None:
        async with stack(2, config={"interval_s": 0.5}) as s:
            await some_traffic(s)
            async with s.client.get(f"{s.url}/metrics") as r:
                assert r.headers["content-type"].startswith("text/plain")
                text = await r.text()
            samples = {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            assert samples["laps_router_requests_total", (("class", "short"),)] == 5
            assert samples["laps_router_requests_total", (("class", "long"),)] == 2
            assert samples["laps_router_ttft_seconds_count", (("class", "short"),)] == 5
            assert samples["laps_router_in_flight", ()] == 0
            assert samples["laps_router_pool_instances", (("pool", "short"),)] == 1
            assert sum(v for (name, _), v in samples.items() if name == "laps_router_instance_up") == 3
            dashboard = (REPO / "examples/monitoring/grafana/dashboards/laps-router.json").read_text()
            json.loads(dashboard)
            asked = set(re.findall(r"\blaps_router_\w+", dashboard))
            assert asked
            assert asked <= {name for name, _ in samples}
            # A scrape gives every sample the labels instance and job: its own of these names would be renamed.
            labels = {label for _, found in samples for label, _ in found}
            assert not labels & {"instance", "job"}
            legends = set(re.findall(r"\{\{(\w+)\}\}", dashboard))
            assert legends <= labels

    asyncio.run(run())


class Stats(HTMLParser):
    """Every ``data-stat`` with its value, and the pool of every instance."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, str] = {}
        self.pool: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {k: v or "" for k, v in attrs}
        if "data-stat" in found:
            self.stats[found["data-stat"]] = found["data-value"]
        if "data-instance" in found:
            self.pool[found["data-instance"]] = found["data-pool"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian package: chromium)")
def test_the_page_in_a_browser_shows_the_numbers_of_the_status(tmp_path: Path) -> None:
    async def run() -> None:
        async with stack(3, 2, config={"interval_s": 0.5}) as s:
            await some_traffic(s)
            await s.until(lambda: len(s.lb.journal.samples) >= 3)
            assert CHROMIUM
            browser = await asyncio.create_subprocess_exec(
                CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path}", "--window-size=390,844",
                "--virtual-time-budget=4000", "--dump-dom", f"{s.url}/laps",
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            async with asyncio.timeout(60):
                out, _ = await browser.communicate()
            page = Stats()
            page.feed(out.decode())
            found = await s.status()
            shown = {k: float(v) for k, v in page.stats.items()}
            assert shown == {
                "in-flight": 0,
                "requests-short": found["counts"]["requests"]["short"],
                "requests-long": found["counts"]["requests"]["long"],
                "ttft-p90-short": found["ttft_ms"]["short"]["p90"],
                "ttft-p90-long": found["ttft_ms"]["long"]["p90"],
                "spilled": 0,
                "moves": sum(found["counts"]["moves"].values()),
                "retried": 0,
                "failed": 0,
                "rejected": 0,
            }
            assert page.pool == {i["url"]: i["pool"] for i in found["prefill"]}
            assert out.decode().count('stroke="currentColor" d="M') == 6

    asyncio.run(run())


def test_the_page_needs_nothing_from_elsewhere() -> None:
    async def run() -> None:
        async with stack(2) as s, s.client.get(f"{s.url}/laps") as r:
            assert r.headers["content-type"] == "text/html; charset=utf-8"
            html = await r.text()
            assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:,)|url\(|@import|https?://(?!")""", html)

    asyncio.run(run())
