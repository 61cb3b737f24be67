"""Views for operators: /laps_status, /metrics, and the page in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import axe
import pytest
from browser import needs_browser, open_page
from laps_core.protocol import PoolRecord
from laps_top.ask import Server
from laps_top.rows import row
from prometheus_client.parser import text_string_to_metric_families

from .fakes import NO_PROBES, Stack, stack

REPO = Path(__file__).resolve().parents[2]


async def some_traffic(s: Stack) -> None:
    for i in range(5):
        assert (await s.post(text="a" * 40))[0] == 200
        if i < 2:
            assert (await s.post(text=f"{i}" * 8000))[0] == 200
    await s.at_rest()


def test_status_reports_pools_counts_ttft_and_history() -> None:
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


def test_metrics_count_requests_and_cover_dashboard() -> None:
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
            dashboard = json.loads((REPO / "examples/monitoring/grafana/dashboards/laps-router.json").read_text())
            labels_of: defaultdict[str, set[str]] = defaultdict(set)
            for name, found in samples:
                labels_of[name] |= {label for label, _ in found}
            targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
            assert targets
            for target in targets:
                asked = re.findall(r"\blaps_router_\w+", target["expr"])
                kept = {label for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in by.split(", ")}
                assert asked
                assert all(name in labels_of and kept <= labels_of[name] for name in asked), target["expr"]
                assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, target["legendFormat"]
            # A scrape adds the labels instance and job to every sample, so a metric must not have these names.
            assert not set().union(*labels_of.values()) & {"instance", "job"}

    asyncio.run(run())


def test_laps_top_row_shows_router_and_reports_missing_key() -> None:
    async def run() -> None:
        async with stack(2, args={"api_key": "geheim"}) as s:
            await s.until(lambda: len(s.lb.journal.samples) >= 1)
            barred = await asyncio.to_thread(Server(s.url).ask)
            answer = await asyncio.to_thread(Server(s.url, "geheim").ask)
        assert row(s.url, barred).error == "needs the key (--api-key)"
        found = row(s.url, answer)
        assert (found.kind, found.error, found.waiting, found.oldest_wait_s) == ("router", "", {"all": 0}, 0.0)
        assert found.busy_share is not None
        assert set(found.ttft_ms) == {"short", "long"}

    asyncio.run(run())


READ = """({
  stats: Object.fromEntries([...document.querySelectorAll("[data-stat]")].map(n => [n.dataset.stat, +n.dataset.value])),
  pools: Object.fromEntries([...document.querySelectorAll("[data-pool]:not([data-pool=''])")]
    .map(n => [n.dataset.instance, n.dataset.pool])),
  lines: document.querySelectorAll('svg path[d^=M]').length,
})"""
"""Script that reads the contents of the page."""
CONTRAST = """(() => {
  const probe = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const over = colours => {
    probe.clearRect(0, 0, 1, 1);
    for (const c of colours) { probe.fillStyle = c; probe.fillRect(0, 0, 1, 1); }
    return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = c => c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    const behind = [];
    for (let n = node; n; n = n.parentElement) behind.unshift(getComputedStyle(n).backgroundColor);
    const style = getComputedStyle(node), ink = node instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(over([...behind, ink])), light(over(behind))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push([walker.currentNode.data.slice(0, 40), ink, ratio]);
  }
  return bad;
})()"""
"""Script that lists texts with less contrast than WCAG requires (AA)."""


MOVED = """new Promise(resolve => new MutationObserver(() => {
  if (document.querySelector(".moved")) resolve(document.getAnimations().length > 0);
}).observe(document.body, {subtree: true, childList: true, attributes: true}))"""
"""Script that records motion when the page shows the move of a server."""


@needs_browser
def test_page_numbers_equal_status(tmp_path: Path) -> None:
    async def run() -> None:
        async with stack(3, 2, config={"interval_s": 0.5}) as s:
            await some_traffic(s)
            await s.until(lambda: len(s.lb.journal.samples) >= 3)
            async with open_page(f"{s.url}/laps", tmp_path) as page:
                await page.wait_until("document.querySelectorAll('svg path[d^=M]').length === 6")
                shown, found = await page.evaluate(READ), await s.status()
            assert shown["stats"] == {
                "in-flight": 0,
                "queued": 0,
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
            assert shown["pools"] == {i["url"]: i["pool"] for i in found["prefill"]}

    asyncio.run(run())


@needs_browser
def test_page_links_to_laps_servers_and_passes_axe(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert request.config.cache is not None
    source = axe.script(request.config.cache.mkdir("axe"))

    async def run() -> None:
        async with stack(3, 1, config={"interval_s": 0.5}) as s:
            s.prefills[0].laps = False
            await some_traffic(s)
            await s.until(lambda: {r.source for r in s.lb.readers} == {"laps_status", "router"})
            async with open_page("about:blank", tmp_path) as page:
                await page.listen()
                await page.send("Page.navigate", url=f"{s.url}/laps")
                await page.wait_until("document.querySelectorAll('.servers a').length === 2")
                links = await page.evaluate("[...document.querySelectorAll('.servers a')].map(a => a.href)")
                assert sorted(links) == sorted(f"{p.url}/laps" for p in s.prefills[1:])
                for scheme in ("light", "dark"):
                    await page.set_media_features(prefers_color_scheme=scheme)
                    assert await axe.findings(page, source) == [], scheme
                assert not page.errors

    asyncio.run(run())


@needs_browser
def test_page_with_64_servers_is_accessible(tmp_path: Path) -> None:
    async def run() -> None:
        async with stack(64, 8, config={"interval_s": 0.5}, args=NO_PROBES) as s:
            await s.until(lambda: len(s.lb.journal.samples) >= 2)
            async with open_page(f"{s.url}/laps", tmp_path) as page:
                await page.wait_until("document.querySelectorAll('.servers tbody tr').length === 72")
                for width, height in ((1280, 1000), (390, 844)):
                    await page.resize(width, height)
                    wide = "[...document.querySelectorAll('body, .scroll')].every(n => n.scrollWidth <= n.clientWidth)"
                    assert await page.evaluate(wide), f"nothing is cut off at {width}"
                    tall = "Math.max(...[...document.querySelectorAll('.servers tr')].map(r => r.offsetHeight))"
                    assert await page.evaluate(tall) <= 40, "rows are compact"
                for scheme in ("light", "dark"):
                    await page.set_media_features(prefers_color_scheme=scheme)
                    assert not await page.evaluate(CONTRAST), scheme
                assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(246, 247, 249)"
                # By ear: tables with names and headers, and few announcements.
                await page.send("Accessibility.enable")
                tree = (await page.send("Accessibility.getFullAXTree"))["nodes"]
                roles = Counter(n["role"]["value"] for n in tree if not n["ignored"])
                assert roles["rowheader"] == 72
                assert roles["columnheader"] >= 9
                named = {n["name"]["value"] for n in tree if not n["ignored"] and n["role"]["value"] == "table"}
                assert {
                    "Long pool 32 servers, pressure 0",
                    "Short pool 32 servers, pressure 0",
                    "Decode servers",
                } <= named
                pictures = [n["name"]["value"] for n in tree if not n["ignored"] and n["role"]["value"] == "image"]
                assert len(pictures) == 3
                assert all("now: short" in name for name in pictures)
                rows = "document.querySelectorAll('.servers tbody tr')"
                await page.evaluate(f"window.kept = [...{rows}]; window.heard = []; new MutationObserver(() =>"
                                    "heard.push(document.getElementById('said').textContent))"
                                    ".observe(document.getElementById('said'), {childList: true}); 0")  # fmt: skip
                shown = "document.getElementById('head').textContent"
                before = await page.evaluate(shown)
                await page.wait_until(f"{shown} !== {json.dumps(before)}")
                assert await page.evaluate("heard.length") == 0, "numbers are not spoken"
                gone = s.lb.pools.instances[5]
                next(p for p in s.prefills if p.url == gone.url).healthy = False
                gone.healthy = False
                await page.wait_until("heard.length > 0")
                assert await page.evaluate("heard[0]") == f"{gone.url.removeprefix('http://')} is unhealthy."
                assert await page.evaluate(f"kept.every((r, i) => r === {rows}[i])"), "rows keep their place"
                # By keyboard: updates can be paused, and the focus is visible.
                await page.press("Tab")
                assert await page.evaluate("document.activeElement.id") == "pause"
                assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
                await page.press("Enter", "\r")
                assert await page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
                still = await page.evaluate(shown)
                await asyncio.sleep(1.5)
                assert await page.evaluate(shown) == still
                await page.press("Enter", "\r")
                await page.wait_until(f"{shown} !== {json.dumps(still)}")
                # Moves are animated, unless the reader prefers reduced motion.
                for i, (motion, moving) in enumerate((("no-preference", True), ("reduce", False))):
                    await page.set_media_features(prefers_reduced_motion=motion)
                    # The page must look before a server moves.
                    await page.evaluate(f"window.seen = {MOVED}; 0")
                    kept = s.prefills[6 + i]
                    kept.pool = PoolRecord(assignment="long", version=kept.pool.version + 1)
                    assert await page.evaluate("window.seen") == moving

    asyncio.run(run())


@needs_browser
def test_page_uses_key_given_to_browser(tmp_path: Path) -> None:
    async def run() -> None:
        async with stack(2, args={"api_key": "geheim"}) as s:
            await s.until(lambda: len(s.lb.journal.samples) >= 1)
            async with open_page(s.url.replace("http://", "http://me:geheim@") + "/laps", tmp_path) as page:
                await page.wait_until("document.querySelectorAll('.servers tbody tr').length === 3")

    asyncio.run(run())


def test_page_loads_no_external_resources() -> None:
    async def run() -> None:
        async with stack(2) as s, s.client.get(f"{s.url}/laps") as r:
            assert r.headers["content-type"] == "text/html; charset=utf-8"
            html = await r.text()
            assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:,)|url\(|@import|https?://(?!")""", html)

    asyncio.run(run())
