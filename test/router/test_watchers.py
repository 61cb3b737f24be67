"""Tasks that watch servers and pools: a failed task restarts, without the others."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from .fakes import stack


def test_failed_health_task_restarts_without_affecting_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_router_laps.servers.upstream import Sessions

    of = Sessions.of
    bad: list[str] = []
    failures = 0

    def failing(self: Sessions, instance: Any) -> aiohttp.ClientSession:
        nonlocal failures
        if instance.url in bad:
            failures += 1
            raise RuntimeError("not a URL that can be asked")
        return of(self, instance)

    monkeypatch.setattr(Sessions, "of", failing)

    async def run() -> None:
        async with stack(2, 2, args={"health_check_interval_secs": 0.1}) as s:
            await s.until(lambda: all(f.probed for f in (*s.prefills, *s.decodes)))
            bad.append(s.decodes[0].url)
            await s.until(lambda: failures > 1, timeout=120)
            others = [(f, f.probed) for f in (*s.prefills, s.decodes[1])]
            await s.until(lambda: all(f.probed > before + 1 for f, before in others))
            tasks = {t["name"]: t for t in (await s.status())["tasks"]}
            assert tasks.keys() == {"clock", "controller", *(f"health of {f.url}" for f in (*s.prefills, *s.decodes))}
            failed = tasks.pop(f"health of {bad[0]}")
            assert failed["restarts"] >= 1
            assert failed["error"] == "RuntimeError: not a URL that can be asked"
            assert all(t["alive"] and t["restarts"] == 0 for t in tasks.values())
            bad.clear()

    asyncio.run(run())
