"""Polls of many clients cost the scheduler only one query."""

from __future__ import annotations

import asyncio

import pytest
from sglang_laps.http.answer_cache import OLDEST_S, AnswerCache


class Scheduler:
    def __init__(self) -> None:
        self.now, self.asked, self.fails = 100.0, 0, False
        self.free = asyncio.Event()
        self.free.set()
        self.kept = AnswerCache(self.ask, lambda: self.now)

    async def ask(self) -> int:
        self.asked += 1
        await self.free.wait()
        if self.fails:
            raise ConnectionError
        return self.asked


def test_sixteen_polling_clients_cause_about_one_query_per_second() -> None:
    async def run() -> None:
        s = Scheduler()
        for _ in range(50):
            for _ in range(16):
                s.now += 1.0 / 16
                _, age_s = await s.kept.get(0.8)
                assert age_s <= 0.8
        assert 50 <= s.asked <= 63

    asyncio.run(run())


def test_failed_query_is_raised_and_not_cached() -> None:
    async def run() -> None:
        s = Scheduler()
        s.fails = True
        for asked in (1, 2):
            with pytest.raises(ConnectionError):
                await s.kept.get(0.8)
            assert s.asked == asked
        s.fails = False
        assert await s.kept.get(0.8) == (3, 0.0)

    asyncio.run(run())


def test_poll_without_age_gets_new_status_and_refreshes_cache() -> None:
    async def run() -> None:
        s = Scheduler()
        assert await s.kept.get() == (1, 0.0)
        assert await s.kept.get() == (2, 0.0)
        s.now += 0.5
        assert await s.kept.get(0.8) == (2, 0.5)
        assert await s.kept.get(float("nan")) == (3, 0.0)
        s.now += OLDEST_S + 1.0
        assert await s.kept.get(float("inf")) == (4, 0.0)

    asyncio.run(run())


def test_polls_during_query_share_its_answer() -> None:
    async def run() -> None:
        s = Scheduler()
        s.free.clear()
        waiting = [asyncio.create_task(s.kept.get(0.8)) for _ in range(5)]
        await asyncio.sleep(0)
        # The first client disconnects.
        waiting[0].cancel()
        await asyncio.sleep(0)
        s.free.set()
        assert [await w for w in waiting[1:]] == [(1, 0.0)] * 4
        assert s.asked == 1

    asyncio.run(run())
