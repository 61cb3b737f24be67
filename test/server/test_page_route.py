"""Routes of a prefill server's page: access rights, and contents that it must not have."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from typing import Any, get_args

import aiohttp
import pytest
from fake_prefill import FakePrefill, serve
from laps_core.receipts.receipt import Cause
from sglang_laps.http import page_route


def basic(password: str) -> str:
    return "Basic " + b64encode(f"anyone:{password}".encode()).decode()


@pytest.mark.parametrize("kind", ["key", "admin"])
def test_page_and_data_require_key_and_same_origin(kind: str) -> None:
    async def run() -> None:
        async with serve(FakePrefill(), **{kind: "geheim"}) as fake, aiohttp.ClientSession() as client:

            async def ask(path: str, **headers: Any) -> tuple[int, str | None]:
                async with client.get(f"{fake.url}/{path}", headers=headers) as r:
                    return r.status, r.headers.get("www-authenticate")

            given_by_a_browser = basic("geheim")
            assert await ask("laps") == (401, page_route.ASK)
            assert await ask("laps_status") == (401, None)
            assert await ask("laps", authorization=basic("wrong")) == (401, page_route.ASK)
            assert await ask("laps", authorization="Basic %%%") == (401, page_route.ASK)
            assert await ask("laps", authorization=basic("ü")) == (401, page_route.ASK)
            for path in sorted(page_route.READ):
                for given in (given_by_a_browser, "Bearer geheim"):
                    assert (await ask(path, authorization=given))[0] == 200, path
                # A script of another site makes the browser send the password.
                assert (await ask(path, authorization=given_by_a_browser, origin="http://elsewhere"))[0] == 401, path
                # So does its image or link, which has no origin. Links to the page are allowed: it has no data.
                foreign = {"authorization": given_by_a_browser, "sec-fetch-site": "cross-site"}
                assert (await ask(path, **foreign))[0] == (200 if path == page_route.ROUTE else 401), path
            async with client.post(f"{fake.url}/laps_status", headers={"authorization": given_by_a_browser}) as r:
                assert r.status in (401, 405)

    asyncio.run(run())


def test_page_has_no_external_resources_and_no_markup_injection() -> None:
    html = page_route.PAGE.read_text()
    assert not re.findall(
        r"""(?:src|href)\s*=\s*["'](?!data:,)|url\(|@import|https?://(?!www\.w3\.org/2000/svg")""", html
    )
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", html)
    assert len(html.splitlines()) < 600
    assert re.search(r"script-src 'sha256-[\w+/=]{44}'; .*connect-src 'self'", page_route.policy(html))


def test_page_table_has_entry_for_every_cause() -> None:
    table = page_route.PAGE.read_text().split("const CAUSES = {")[1].split("};")[0]
    assert set(re.findall(r"^\s*(\w+): \[", table, re.MULTILINE)) == set(get_args(Cause))
