"""The page on a real prefill server, in a real browser."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

from browser import needs_browser, open_page
from laps_top.ask import Server
from laps_top.rows import row
from served import OVERLAP, Prefill, random_prompt, run_on, send_all

pytestmark = run_on(OVERLAP)


@needs_browser
def test_page_of_real_server_shows_requests(prefill: Prefill, tmp_path: Path) -> None:
    async def run() -> None:
        await send_all(prefill, [random_prompt(1, 300), *(random_prompt(2 + i, 40) for i in range(5))])
        async with open_page("about:blank", tmp_path) as page:
            await page.listen()
            await page.send("Page.navigate", url=f"{prefill.server.url}/laps")
            await page.wait_until("document.querySelector('[data-stat=depth-short]')?.dataset.value === '0'")
            await page.wait_until("document.getElementById('head').textContent.includes('short up to 256 tokens')")
            await page.wait_until("document.querySelectorAll('#slowest tbody tr').length >= 6")
            assert not page.errors

    asyncio.run(run())
    with urllib.request.urlopen(f"{prefill.server.url}/laps", timeout=180) as reply:
        assert "script-src 'sha256-" in reply.headers["content-security-policy"]
    found = row("", Server(prefill.server.url, timeout_s=180).ask())
    assert (found.kind, found.error, found.waiting) == ("prefill", "", {"short": 0, "long": 0})
    assert found.ttft_ms.keys() == {"short", "long"}
