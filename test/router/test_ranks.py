"""Prefill servers with several DP ranks: the rank that holds a prefix gets the requests with this prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from laps_core.pools.prefill import PrefillInstance

from .fake_ranks import RankedPrefill
from .fakes import LONG, Stack, World, entry, stack

ONE_POOL = {"initial_short": None, "interval_s": 0.2}
DOCUMENT = "".join(f"{i:04d} and on " for i in range(400))


def servers(*sizes: int, **how: Any) -> Callable[[World], RankedPrefill]:
    """Return a function that makes one server of each size."""
    left = iter(sizes)
    return lambda world: RankedPrefill(world, next(left), **how)


def ranked(s: Stack, n: int = 0) -> RankedPrefill:
    server = s.prefills[n]
    assert isinstance(server, RankedPrefill)
    return server


async def metrics(s: Stack) -> str:
    async with s.client.get(f"{s.url}/metrics") as reply:
        return await reply.text()


async def known(s: Stack, size: int, n: int = 0) -> PrefillInstance:
    """Return the router's instance of a server, once the router knows its number of ranks."""
    instance = s.lb.pools.instances[n]
    await s.until(lambda: len(instance.places) == size)
    return instance


async def chats(s: Stack, users: int, turns: int, **more: Any) -> float:
    """Run ``users`` chats of ``turns`` turns, one turn of each chat at a time. Return the share of the prompt
    tokens of later turns that was in the cache of the chosen rank."""
    texts = [f"user {u} " + DOCUMENT for u in range(users)]
    asked = cached = 0
    for turn in range(turns):
        statuses = await asyncio.gather(*(s.post(text=text, **more) for text in texts))
        assert {status for status, _ in statuses} == {200}
        if not turn:
            asked, cached = (
                -sum(getattr(ranked(s, n), k) for n in range(2)) for k in ("asked_tokens", "cached_tokens")
            )
        texts = [text + f" and then {turn}?" * 8 for text in texts]
    asked, cached = (
        before + sum(getattr(ranked(s, n), k) for n in range(2))
        for before, k in ((asked, "asked_tokens"), (cached, "cached_tokens"))
    )
    return cached / asked


@pytest.mark.parametrize("laps", [True, False], ids=["laps", "stock"])
def test_chat_turns_go_to_dp_rank_with_cached_history(laps: bool) -> None:
    async def share(tells: bool) -> float:
        # A history costs a fifth of a second to compute. If it cost nothing, the router would only learn the delays of
        # a busy machine and rightly ignore histories.
        make = servers(4, 4, laps=laps, tells=tells, tokens_per_s=6000.0)
        async with stack(2, config=ONE_POOL, make_prefill=make) as s:
            for n in range(2):
                await known(s, 4 if tells else 1, n)
            found = await chats(s, users=12, turns=5)
            await s.at_rest()
            if tells:
                # Every rank serves some requests.
                assert all(r.served for n in range(2) for r in ranked(s, n).ranks)
            return found

    assert asyncio.run(share(True)) > 0.9
    assert asyncio.run(share(False)) < 0.7


def test_dp_rank_with_reported_backlog_is_avoided() -> None:
    """One rank of each server has work of other routers, so no request goes there."""

    async def run() -> None:
        async with stack(2, config=ONE_POOL, make_prefill=servers(2, 2, tokens_per_s=20_000.0)) as s:
            for n in range(2):
                ranked(s, n).ranks[0].backlog = 5_000_000
                instance = await known(s, 2, n)
                await s.until(lambda i=instance: i.places[0].outlook.waiting(i.clock()).long > 0.0)  # type: ignore[misc]
            for i in range(8):
                assert (await s.post(text=f"{i}{LONG}"))[0] == 200
            assert [len(ranked(s, n).ranks[0].served) for n in range(2)] == [0, 0]

    asyncio.run(run())


@pytest.mark.parametrize("each", [True, False])
def test_requests_are_spread_evenly_over_dp_ranks(each: bool) -> None:
    """If ranks do not report their own loads, the router uses its own counts of sent work."""

    async def run() -> None:
        async with stack(2, config=ONE_POOL, make_prefill=servers(4, 4, each=each)) as s:
            for n in range(2):
                await known(s, 4, n)
                s.prefills[n].gate.clear()
            held = [asyncio.create_task(s.post(text=f"{i}{LONG}")) for i in range(16)]
            await s.until(lambda: sum(len(p.bodies) for p in s.prefills) == 16)
            assert [len(r.served) for n in range(2) for r in ranked(s, n).ranks] == [2] * 8
            found = entry(await s.status(), s.prefills[0])
            assert [r["outstanding_requests"] for r in found["ranks"]] == [2] * 4
            assert found["outstanding_requests"] == 8
            async with s.client.get(f"{s.url}/metrics") as r:
                assert f'rank_outstanding_tokens{{rank="3",server="{s.prefills[0].url}"}}' in await r.text()
            for p in s.prefills:
                p.gate.set()
            assert {status for status, _ in await asyncio.gather(*held)} == {200}
            await s.at_rest()
            for instance in s.lb.pools.instances:
                for rank in instance.places:
                    assert (rank.outstanding, rank.outstanding_tokens) == (0, 0)
                places = (instance, *instance.places)
                # A report from the middle of a request counts as work of other routers until the next one.
                await s.until(lambda i=instance, p=places: not any(sum(x.outlook.waiting(i.clock())) for x in p))  # type: ignore[misc]

    asyncio.run(run())


@pytest.mark.parametrize(("route", "prompts"), [("generate", "text"), ("v1/completions", "prompt")])
def test_batch_uses_one_dp_rank_and_separate_bootstrap_rooms(route: str, prompts: str) -> None:
    async def run() -> None:
        async with stack(2, config=ONE_POOL, make_prefill=servers(3, 3)) as s:
            for n in range(2):
                await known(s, 3, n)
            for _ in range(6):
                assert (await s.post(route, **{prompts: ["one", "two", LONG]}))[0] == 200
            bodies = [b for p in s.prefills for b in p.bodies]
            rooms = [b["bootstrap_room"] for b in bodies]
            assert all(len(set(r)) == 3 and len({room % 3 for room in r}) == 1 for r in rooms)
            # The decode server gets the same rooms and rank.
            told = {b["bootstrap_room"][0]: b["disagg_prefill_dp_rank"] for b in s.decodes[0].bodies}
            assert told == {b["bootstrap_room"][0]: b["bootstrap_room"][0] % 3 for b in bodies}

    asyncio.run(run())


@pytest.mark.parametrize("laps", [True, False], ids=["laps", "stock"])
def test_router_picks_no_dp_rank_for_other_balance_methods(laps: bool) -> None:
    async def run() -> None:
        make = servers(2, 2, laps=laps, method="total_tokens")
        async with stack(2, config=ONE_POOL, make_prefill=make) as s:
            source = "laps_status" if laps else "v1/loads"
            await s.until(lambda: all(r.source == source for r in s.lb.readers))
            for i in range(4):
                assert (await s.post(text=f"{i}{LONG}"))[0] == 200
            assert [len(i.places) for i in s.lb.pools.instances] == [1, 1]
            assert all("disagg_prefill_dp_rank" not in b for p in s.prefills for b in p.bodies)
            assert "ranks" not in entry(await s.status(), s.prefills[0])

    asyncio.run(run())


def test_stock_server_info_is_queried_once_for_dp_ranks() -> None:
    async def run() -> None:
        async with stack(2, config=ONE_POOL, make_prefill=servers(2, 1, laps=False)) as s:
            await known(s, 2)
            load = s.lb.readers[0].load
            await s.until(lambda: s.lb.readers[0].load is not load)
            assert [ranked(s, n).info_asked for n in range(2)] == [1, 0]

    asyncio.run(run())


def test_status_and_metrics_show_group_of_dp_ranks() -> None:
    async def scenario() -> None:
        async with stack(1, config=ONE_POOL, make_prefill=servers(2)) as s:
            await known(s, 2)
            assert "group" not in (await s.status())["prefill"][0]
            assert "group_steps{" not in await metrics(s)
            told = {"steps": 12, "budget_s": 0.25, "waiting_share": 0.125}
            ranked(s).group = {"on": True, "why_not": None, **told, "cost": {"ranks": 2}}
            # A poll that takes long lets the group age meanwhile.
            status = await s.status_when(lambda found: "group" in found["prefill"][0])
            assert status["prefill"][0]["group"] == {"on": True, **told}
            async with asyncio.timeout(120):
                while "group_steps{" not in (found := await metrics(s)):
                    await asyncio.sleep(0.01)
            assert f'group_waiting_share{{server="{s.lb.readers[0].instance.url}"}} 0.125' in found
            ranked(s).group = {"on": False, "why_not": "its ranks do not run their steps together"}
            await s.until(lambda: s.lb.readers[0].group is None)

    asyncio.run(scenario())


@pytest.mark.parametrize("laps", [True, False], ids=["laps", "stock"])
def test_router_follows_changed_number_of_dp_ranks(laps: bool) -> None:
    async def run() -> None:
        async with stack(2, config=ONE_POOL, make_prefill=servers(2, 2, laps=laps)) as s:
            for size in (2, 5, 1, 3):
                for n in range(2):
                    ranked(s, n).resize(size)
                    await known(s, size, n)
                statuses = await asyncio.gather(*(s.post(text=f"{size}{i}{LONG}") for i in range(20)))
                assert {status for status, _ in statuses} == {200}
                assert all(r.served for n in range(2) for r in ranked(s, n).ranks)
            await s.at_rest()

    asyncio.run(run())


def test_prefix_miss_corrects_only_affected_dp_rank() -> None:
    async def run() -> None:
        async with stack(2, config=ONE_POOL, make_prefill=servers(2, 2, tokens_per_s=6000.0)) as s:
            for n in range(2):
                await known(s, 2, n)
            for i in range(8):
                assert (await s.post(text=f"{i} {DOCUMENT}"))[0] == 200
            (server, number) = next(
                (n, k) for n in range(2) for k, r in enumerate(ranked(s, n).ranks) if any("0 0000" in t for t in r.held)
            )
            before = {p: len(p.prefixes) for i in s.lb.pools.instances for p in i.places}
            ranked(s, server).ranks[number].held.clear()
            assert (await s.post(text=f"0 {DOCUMENT}"))[0] == 200
            lost = {p: n - len(p.prefixes) for p, n in before.items()}
            place = s.lb.pools.instances[server].places[number]
            assert lost.pop(place) > 0
            assert set(lost.values()) == {0}

    asyncio.run(run())


def test_cached_prefixes_are_separate_for_each_adapter() -> None:
    async def run() -> None:
        async with stack(2, config=ONE_POOL, make_prefill=servers(2, 2, tokens_per_s=6000.0)) as s:
            for n in range(2):
                await known(s, 2, n)
            assert await chats(s, users=4, turns=3) > 0.9
            assert await chats(s, users=4, turns=3, lora_path="a") > 0.9
            before = sum(ranked(s, n).cached_tokens for n in range(2))
            choices = s.lb.counts.prefix_tokens
            # The router expects no hit in the cache of another adapter, and none occurs.
            assert (await s.post(text=f"user 0 {DOCUMENT}", lora_path="b"))[0] == 200
            assert sum(ranked(s, n).cached_tokens for n in range(2)) == before
            assert s.lb.counts.prefix_tokens == choices

    asyncio.run(run())


@pytest.mark.parametrize(
    ("named", "header"),
    [({"routed_dp_rank": 1}, None), ({"data_parallel_rank": 0}, None), ({}, "X-Data-Parallel-Rank")],
)
def test_router_keeps_dp_rank_named_by_client(named: dict[str, int], header: str | None) -> None:
    async def run() -> None:
        async with stack(2, config=ONE_POOL, make_prefill=servers(2, 2)) as s:
            for n in range(2):
                await known(s, 2, n)
            headers = {header: "1"} if header else {}
            body = {"text": LONG, **named}
            async with s.client.post(f"{s.url}/generate", json=body, headers=headers) as r:
                assert r.status == 200
            (prefill,) = [p for p in s.prefills if p.bodies]
            for server in (prefill, s.decodes[0]):
                assert "disagg_prefill_dp_rank" not in server.bodies[0]
                assert named.items() <= server.bodies[0].items()
                assert server.headers[0].get("x-data-parallel-rank") == ("1" if header else None)

    asyncio.run(run())


def test_null_names_no_rank() -> None:
    """Some clients send all fields that they know."""

    async def run() -> None:
        async with stack(1, config=ONE_POOL, make_prefill=servers(2)) as s:
            await known(s, 2)
            nulls: Any = dict.fromkeys(("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"))
            assert (await s.post(text=LONG, **nulls))[0] == 200
            for seen in (s.prefills[0].bodies[0], s.decodes[0].bodies[0]):
                assert seen["disagg_prefill_dp_rank"] == seen["bootstrap_room"] % 2

    asyncio.run(run())


def test_implausible_dp_rank_count_is_ignored() -> None:
    class Boasting(RankedPrefill):
        async def _laps_status(self, request: Any) -> Any:
            reply = await super()._laps_status(request)
            reply.text = str(reply.text).replace('"dp_size": 2', '"dp_size": 1000000000')
            return reply

    async def run() -> None:
        async with stack(2, config=ONE_POOL, make_prefill=lambda world: Boasting(world, 2)) as s:
            await s.until(lambda: all(r.source == "laps_status" for r in s.lb.readers))
            assert [len(i.places) for i in s.lb.pools.instances] == [1, 1]

    asyncio.run(run())
