"""The page of a prefill server in a real browser, with made-up data."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import axe
import pytest
from browser import Page, needs_browser, open_page
from fake_prefill import FakePrefill, serve
from laps_core.receipts.receipt import Cause, Receipt

TEXT = "document.getElementById('{}')?.textContent"
STATS = """Object.fromEntries([...document.querySelectorAll("[data-stat]")]
    .map(n => [n.dataset.stat, +n.dataset.value]))"""
FULL = "document.querySelectorAll('#slowest tbody tr').length === 20 && document.getElementById('answer').hidden"
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
EMPTY = f"{TEXT.format('head')}.startsWith('0.1.0')"


@asynccontextmanager
async def open_laps_page(fake: FakePrefill, folder: Path, until: str = FULL, hash_: str = "") -> AsyncIterator[Page]:
    async with serve(fake), open_page("about:blank", folder) as page:
        await page.listen()
        await page.send("Page.navigate", url=f"{fake.url}/laps{hash_}")
        await page.wait_until(until)
        yield page


@needs_browser
def test_page_shows_status_and_receipts(tmp_path: Path) -> None:
    async def run() -> None:
        # A slow machine takes long to start the browser; requests must arrive until the end.
        fake = FakePrefill(seconds=300.0)
        fake.extra = {"queues": {c: {"depth": 3, "waiting_tokens": n, "oldest_wait_s": 0.5} for c, n in
                                 (("short", 300), ("long", 9000))}}  # fmt: skip
        long = {"new": 4000, "cached": 0, "ttft_ms": 900.0, "low_ms": 800.0, "high_ms": 1200.0, "bound_ms": 3000.0}
        outcomes = {"long": {"inside": 3, "below": 1, "above": 0}}
        fake.extra["quotes"] = {"typical": {"long": long}, "outcomes": outcomes}
        async with open_laps_page(fake, tmp_path) as page:
            await page.wait_until("document.querySelector('[data-stat=depth-short]').dataset.value === '3'")
            stats = await page.evaluate(STATS)
            assert stats == {
                **{f"depth-{c}": 3 for c in ("short", "long")},
                **{"tokens-short": 300, "tokens-long": 9000, "oldest-short": 500, "oldest-long": 500},
                **{"busy": 83, "preemptions": 1239, "in-progress": 0, "model-error": 4.3, "holds": 120_000},
            }
            # The page's list can be older, and newer requests can be slower.
            slow = await page.evaluate("[...document.querySelectorAll('#slowest tbody tr')].map(r => r.dataset.key)")
            times = {r.rid: r.ttft_ms for r in fake.receipts(1e12)}
            assert [times[rid] for rid in slow] == sorted((times[rid] for rid in slow), reverse=True)
            requests = await page.evaluate("+document.querySelector('#quantiles tbody td').textContent")
            assert requests > 200
            assert await page.evaluate("document.querySelectorAll('#scatter circle').length") > 200
            label = await page.evaluate("document.getElementById('lanes').getAttribute('aria-label')")
            shape = r"30 seconds of the device: \d+ steps, short batches \d+% of the time, idle \d+%, \d+ steps .*"
            assert re.fullmatch(shape, label)
            assert await page.evaluate("drawn.length") > 1000
            assert await page.evaluate(TEXT.format("quoted")) == (
                "A long request of 4,000 new tokens that came now is quoted 900 ms (80%: 800 to 1,200 ms, "
                "at most 3,000 ms). 75% of 4 quotes held."
            )
            # Show one class only.
            await page.evaluate("document.querySelector('input[value=short]').click()")
            await page.wait_until("[...document.querySelectorAll('#slowest tbody td:nth-child(2)')]"
                             ".every(n => n.textContent === 'short')")  # fmt: skip
            assert not page.errors

    asyncio.run(run())


@needs_browser
def test_page_names_request_that_caused_wait(tmp_path: Path) -> None:
    async def run() -> None:
        fake = FakePrefill(seconds=150.0)
        # The page finds requests by a prefix of the id until 30 s after their end, so take the newest.
        fake.ended = True
        newest_first = reversed(fake.histories[0].receipts)
        asked: Receipt = next(r for r in newest_first if r.cls == "short" and "behind_long" in r.causes)
        first = asked.behind[0]
        async with open_laps_page(fake, tmp_path) as page:
            # By keyboard only: the field, its text, Enter, then the first link of the answer.
            await page.evaluate("document.getElementById('rid').focus()")
            await page.send("Input.insertText", text=asked.rid)
            await page.press("Enter", "\r")
            await page.wait_until("document.activeElement.id === 'h-answer'")
            sentence = await page.evaluate(TEXT.format("sentence"))
            number = f"{asked.ttft_ms:,.0f} ms"
            assert sentence.startswith(f"Its first token came after {number}. Of these it ")
            assert f"(longest behind {first.rid}, {first.tokens:,} tokens)" in sentence
            assert await page.evaluate("document.querySelectorAll('#receipt .bar i').length") == len(asked.causes)
            await page.press("Tab")
            assert await page.evaluate("document.activeElement.textContent") == first.rid
            await page.press("Enter", "\r")
            await page.wait_until(f"{TEXT.format('h-answer')}.startsWith('{first.rid}')")
            # The browser's Back returns to the previous question.
            await page.evaluate("history.back()")
            await page.wait_until(f"{TEXT.format('h-answer')}.startsWith('{asked.rid}')")
            # A prefix of the id suffices, and an unknown id is reported.
            await page.evaluate(f"location.hash = '#rid={asked.rid[:6]}'")
            await page.wait_until(f"document.querySelector('#receipt a')?.textContent.startsWith('{asked.rid[:6]}')")
            await page.evaluate("location.hash = '#rid=nobody'")
            await page.wait_until(f"{TEXT.format('sentence')}.startsWith('No receipt of it')")
            assert not page.errors

    asyncio.run(run())


@needs_browser
def test_address_with_rid_opens_answer_and_escapes_markup(tmp_path: Path) -> None:
    async def run() -> None:
        fake, evil = FakePrefill(), "<img src=x onerror=alert(1)>"
        old: Receipt = fake.histories[0].receipts[0]
        causes: dict[Cause, float] = {**old.causes, "no such cause": 1.0}  # type: ignore[dict-item]
        whale = Receipt(
            rid=evil, cls="long", arrived_s=old.arrived_s, new_tokens=1, cached_tokens=0, ttft_ms=1e6, causes=causes
        )
        fake.histories[0].receipts.append(whale)
        for run in fake.histories[0].runs:
            run.name, run.args["requests"] = f"short: {evil}", [evil]
        fake.ended = True
        async with open_laps_page(
            fake, tmp_path, f"{TEXT.format('h-answer')}.startsWith('<img')", f"#rid={evil}"
        ) as page:
            await page.evaluate("document.getElementById('steps').open = true")
            await page.wait_until("document.querySelectorAll('#step-table tbody th, #slowest a').length > 30", 20)
            assert not await page.evaluate("document.querySelectorAll('img').length")
            assert evil in await page.evaluate(TEXT.format("slowest"))
            assert not page.errors

    asyncio.run(run())


@needs_browser
def test_page_passes_axe_checks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert request.config.cache is not None
    source = axe.script(request.config.cache.mkdir("axe"))

    async def run() -> None:
        one = FakePrefill().histories[0].receipts[0].rid
        cases: list[tuple[str, FakePrefill, str]] = [
            ("data", FakePrefill(ranks=2), FULL),
            ("an answer", FakePrefill(), f"{TEXT.format('h-answer')}.startsWith('{one}')"),
            ("no data", FakePrefill(empty=True), EMPTY),
            ("off", FakePrefill(empty=True, reason="<b>--disaggregation-mode</b> is decode"), EMPTY),
        ]
        for i, (name, fake, until) in enumerate(cases):
            hash_ = f"#rid={one}" if name == "an answer" else ""
            async with open_laps_page(fake, tmp_path / str(i), until, hash_) as page:
                await page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
                for scheme in ("light", "dark"):
                    await page.set_media_features(prefers_color_scheme=scheme)
                    for width in (1280, 390):
                        await page.resize(width, 900)
                        assert await axe.findings(page, source) == [], (name, scheme, width)
                        assert await page.evaluate(FITS), (name, width)
                assert not page.errors, name
                if name == "off":
                    assert "<b>--disaggregation-mode</b> is decode" in await page.evaluate(TEXT.format("off"))
                if name == "data":
                    await page.evaluate("document.getElementById('ask').append(document.createElement('input'))")
                    assert len(await axe.findings(page, source)) == 1, "axe finds what is wrong"

    asyncio.run(run())


@needs_browser
def test_steps_read_in_parts_appear_complete_and_once(tmp_path: Path) -> None:
    async def run() -> None:
        fake = FakePrefill(ranks=2, seconds=300.0)
        async with open_laps_page(fake, tmp_path) as page:
            before = fake.request_counts["trace"]
            async with asyncio.timeout(60):
                while fake.request_counts["trace"] < before + 8:
                    await asyncio.sleep(0.05)
            newest, seen = await page.evaluate("[newest, steps.map(e => [e.pid, e.name, e.ts, e.end, e.measured])]")
        newest *= 1e-6
        begin, end = newest - 25, newest - 0.5
        made = [
            [h.rank + 1, r.name, 1e6 * (h.start_s + r.begin), 1e6 * (h.start_s + r.end), r.args["measured_ms"]]
            for h in fake.histories
            for r in h.runs
            if begin < h.start_s + r.end < end
        ]
        found = [s for s in seen if begin < 1e-6 * s[3] < end]
        assert len(made) > 400
        for a, b in zip(sorted(made), sorted(found), strict=True):
            assert a[:2] == b[:2]
            assert a[2:] == pytest.approx(b[2:], abs=2.0), "microseconds"

    asyncio.run(run())


STOPS = """(() => { window.stops = []; addEventListener("focusin", e => stops.push(
  [e.target.id || e.target.tagName, getComputedStyle(e.target).outlineStyle])); })()"""


@needs_browser
def test_all_controls_are_reachable_and_visible_by_tab(tmp_path: Path) -> None:
    async def run() -> None:
        async with open_laps_page(FakePrefill(), tmp_path) as page:
            await page.evaluate(STOPS)
            await page.evaluate("document.querySelector('main').lastElementChild.open = true")
            await page.press("Tab")
            for _ in range(120):
                await page.press("Tab")
                if await page.evaluate("document.activeElement.id") == "config":
                    break
            stops = await page.evaluate("stops")
            ids = [name for name, _ in stops]
            assert ids[:5] == ["pause", "rid", "BUTTON", "span", "until"]
            assert {"SUMMARY", "INPUT", "A", "config"} <= set(ids)
            assert all(outline != "none" for _, outline in stops)
            # A paused page sends no requests.
            await page.evaluate("document.getElementById('pause').focus()")
            await page.press("Enter", "\r")
            assert await page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"

    asyncio.run(run())


@needs_browser
def test_missing_data_is_reported_and_hidden_page_stops_polling(tmp_path: Path) -> None:
    async def run() -> None:
        fake = FakePrefill(missing=True)
        fake.extra = {"load": {"busy_share": 0.25}}
        begin = time.monotonic()
        async with open_laps_page(fake, tmp_path, EMPTY) as page:
            await page.wait_until(f"{TEXT.format('n-trace')} === 'This server has no trace of its device.'")
            await page.wait_until(f"{TEXT.format('n-receipts')} === 'This server has no receipts.'")
            await page.wait_until("document.querySelector('[data-stat=busy]').dataset.value === '25'")
            before = fake.request_counts["status"]
            async with asyncio.timeout(30):
                while fake.request_counts["status"] < before + 3:
                    await asyncio.sleep(0.05)
            most = 1 + (time.monotonic() - begin) / 30.0
            assert 1 <= fake.request_counts["trace"] <= most, "asked again after half a minute"
            await page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true}); 0")
            await page.wait_until("!asking")
            before = fake.request_counts["status"]
            await asyncio.sleep(2.5)
            assert fake.request_counts["status"] == before
            await page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); 0")
            async with asyncio.timeout(30):
                while fake.request_counts["status"] == before:
                    await asyncio.sleep(0.05)
            assert all("404" in e for e in page.errors), page.errors

    asyncio.run(run())


@needs_browser
def test_page_uses_key_given_to_browser(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            serve(FakePrefill(), key="geheim") as fake,
            open_page(fake.url.replace("//", "//me:geheim@") + "/laps", tmp_path) as page,
        ):
            await page.wait_until(FULL)

    asyncio.run(run())
