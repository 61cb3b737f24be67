"""A headless Chromium, controlled through the DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
)  # fmt: skip

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian package: chromium)")


class Page:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._sent = 0
        self.errors: list[str] = []
        """Console errors and warnings since ``listen``, collected while a command waits for its answer."""

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result. Raises RuntimeError if the command fails."""
        self._sent += 1
        await self._socket.send_json({"id": self._sent, "method": method, "params": params})
        async with asyncio.timeout(180):
            while (answer := await self._socket.receive_json()).get("id") != self._sent:
                self._collect_error(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    async def listen(self) -> None:
        """Collect errors from now on."""
        await self.send("Runtime.enable")
        await self.send("Log.enable")

    def _collect_error(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited. Raises RuntimeError if the expression throws."""
        found = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    async def wait_until(self, script: str, timeout_s: float = 180.0) -> None:
        """Wait until the expression is true."""
        async with asyncio.timeout(timeout_s):
            while not await self.evaluate(script):
                await asyncio.sleep(0.05)

    async def resize(self, width: int, height: int) -> None:
        """Set the size of the page (CSS pixels)."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)

    async def set_media_features(self, **media: str) -> None:
        """Set media features, such as ``prefers_color_scheme="dark"``."""
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def press(self, key: str, text: str = "") -> None:
        """Press and release one key."""
        down = {"key": key, "code": key, "windowsVirtualKeyCode": {"Tab": 9, "Enter": 13, " ": 32}[key], "text": text}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **down)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)


@contextlib.asynccontextmanager
async def open_page(url: str, folder: Path) -> AsyncIterator[Page]:
    """Open ``url`` in a new browser, which keeps its files in ``folder``."""
    assert CHROMIUM
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = folder / "DevToolsActivePort"
        async with asyncio.timeout(180):
            while not port.exists() or "\n" not in port.read_text():
                assert process.returncode is None
                await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}"
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{address}/json/list") as r:
                (target,) = [t for t in await r.json() if t["type"] == "page"]
            async with client.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                await page.send("Page.navigate", url=url)
                yield page
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
