"""Reports of decode servers on their KV caches, over real sockets: choice of servers, status and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .fake_ranks import TellingDecode
from .fakes import SHORT, Stack, World, entry, stack

QUICK = {"interval_s": 0.2}


def servers(*made: dict[str, Any]) -> Callable[[World], TellingDecode]:
    left = iter(made)
    return lambda world: TellingDecode(world, **next(left))


async def read(s: Stack, *taken: int | None) -> None:
    """Wait until the router knows these used KV tokens of the decode servers (None: a server reports nothing)."""

    def told() -> list[int | None]:
        return [d.kv.reported if d.kv else None for d in s.lb.decoders]

    await s.until(lambda: told() == list(taken))


async def read_again(s: Stack) -> None:
    """Wait until the router has reports that it asked for after this call: older ones may count requests under way."""
    tellers = [d for d in s.decodes if isinstance(d, TellingDecode)]
    before = [d.asked for d in tellers]
    # The next question may have been on its way; the one after it is new, and answered once a third one comes.
    await s.until(lambda: all(d.asked >= asked + 3 for d, asked in zip(tellers, before, strict=True)))


def got(s: Stack) -> list[int]:
    return [len(d.bodies) for d in s.decodes]


def test_decode_choice_counts_kv_tokens_of_other_routers() -> None:
    async def run() -> None:
        make = servers({"others": 90_000}, {"others": 10_000, "ranks": 2})
        async with stack(2, 2, QUICK, make_decode=make) as s:
            await read(s, 90_000, 10_000)
            for _ in range(5):
                assert (await s.post(text=SHORT))[0] == 200
            assert got(s) == [0, 5]
            await read_again(s)
            found = await s.status()
            assert [entry(found, d)["kv_tokens"] for d in s.decodes] == [
                {"held": 90_000, "told": 90_000, "capacity": 100_000},
                {"held": 10_000, "told": 10_000, "capacity": 100_000},
            ]
            async with s.client.get(f"{s.url}/metrics") as r:
                metrics = await r.text()
            assert f'laps_router_kv_held_tokens{{server="{s.decodes[0].url}"}} 90000.0' in metrics
            assert f'laps_router_kv_capacity_tokens{{server="{s.decodes[1].url}"}} 100000.0' in metrics
            # The other routers' requests move to the other server.
            first, second = s.decodes
            assert isinstance(first, TellingDecode)
            assert isinstance(second, TellingDecode)
            first.others, second.others = 0, 50_000
            await read(s, 0, 50_000)
            assert (await s.post(text=SHORT))[0] == 200
            assert got(s) == [1, 5]

    asyncio.run(run())


def test_request_goes_to_decode_server_with_enough_free_kv() -> None:
    async def run() -> None:
        make = servers({"capacity": 1000}, {"capacity": 100_000, "others": 99_800})
        async with stack(2, 2, QUICK, make_decode=make) as s:
            await read(s, 0, 99_800)
            for new, expected in ((8, [1, 0]), (10_000, [2, 0]), (8, [3, 0])):
                # An answer counts with at most 512 tokens.
                assert (await s.post(text=SHORT, sampling_params={"max_new_tokens": new}))[0] == 200
                assert got(s) == expected
            assert (await s.post(text="w" * 8000))[0] == 200
            assert got(s) == [3, 1]

    asyncio.run(run())


def test_decode_server_without_reports_is_rated_by_sent_tokens() -> None:
    async def run() -> None:
        make = servers({"capacity": None}, {"others": 60_000})
        async with stack(2, 2, QUICK, make_decode=make) as s:
            await read(s, None, 60_000)
            for _ in range(3):
                assert (await s.post(text=SHORT))[0] == 200
            assert got(s) == [3, 0]
            found = await s.status()
            assert entry(found, s.decodes[0])["kv_tokens"] == {"held": 0, "told": None, "capacity": None}
            # The router asks once, then not again for a while.
            silent = s.decodes[0]
            assert isinstance(silent, TellingDecode)
            assert silent.asked == 1

    asyncio.run(run())


def test_kv_reader_follows_joining_and_leaving_servers() -> None:
    async def run() -> None:
        async with stack(2, 1, QUICK, make_decode=servers({}, {})) as s:
            late = TellingDecode(s.decodes[0].world, others=1234)
            await late.start()
            joined = s.lb.add("decode", late.url, None, "test")
            await s.until(lambda: getattr(joined, "kv", None) is not None and joined.kv.reported == 1234)  # type: ignore[attr-defined]
            s.lb.remove(late.url)
            asked = late.asked
            first = s.decodes[0]
            assert isinstance(first, TellingDecode)
            before = first.asked
            await s.until(lambda: first.asked > before + 3)
            assert late.asked <= asked + 1
            await late.stop()

    asyncio.run(run())


def test_invalid_kv_reports_are_ignored() -> None:
    async def run() -> None:
        make = servers({"others": -5}, {"capacity": 0})
        async with stack(2, 2, QUICK, make_decode=make) as s:
            for d in s.decodes:
                assert isinstance(d, TellingDecode)
                await s.until(lambda d=d: d.asked == 1)  # type: ignore[misc]
            assert (await s.post(text=SHORT))[0] == 200
            assert [d.kv for d in s.lb.decoders] == [None, None]

    asyncio.run(run())
