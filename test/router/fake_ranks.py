"""Fake prefill server with data-parallel ranks, and fake decode server that reports its KV usage. No model."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from .fakes import Body, FakeDecode, FakePrefill, World, answer, prompt_tokens, rooms_of

BLOCK = 64
"""Block of a rank's prefix cache (characters)."""


class FakeRank:
    """One DP rank: its device and the texts in its prefix cache."""

    def __init__(self) -> None:
        self.device = asyncio.Lock()
        self.held: set[str] = set()
        self.served: list[Body] = []
        self.backlog = 0

    def cached(self, text: str) -> int:
        """Return the length of the cached prefix of ``text`` (tokens)."""
        at = 0
        while at + BLOCK <= len(text) and text[: at + BLOCK] in self.held:
            at += BLOCK
        return at // 4

    def hold(self, text: str) -> None:
        self.held |= {text[:at] for at in range(BLOCK, len(text) + 1, BLOCK)}


class RankedPrefill(FakePrefill):
    """Prefill server with ``size`` ranks. The bootstrap room selects the rank of a request; with another ``method``
    the ranks take turns. The server reports its ranks only if ``tells``."""

    def __init__(
        self,
        world: World,
        size: int = 2,
        tokens_per_s: float = 1e9,
        laps: bool = True,
        method: str = "follow_bootstrap_room",
        tells: bool = True,
        each: bool = True,
    ) -> None:
        """``each``: report the load of each rank."""
        super().__init__(world, tokens_per_s, laps)
        self.by_room, self.method = method == "follow_bootstrap_room", method
        self.tells, self.each = tells, each
        self.group: dict[str, Any] | None = None
        """Reported group plan of the ranks."""
        self.info_asked = 0
        self.asked_tokens = self.cached_tokens = 0
        """Tokens of all prompts so far, and those of them found in the cache of their rank."""
        self.resize(size)

    def resize(self, size: int) -> None:
        """Replace all ranks, as if another process had started under this URL."""
        self.ranks = [FakeRank() for _ in range(size)]

    def add_routes(self, app: web.Application) -> None:
        super().add_routes(app)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/server_info", self._server_info)

    async def _laps_status(self, request: web.Request) -> web.Response:
        if not self.laps:
            raise web.HTTPNotFound
        loads = [{"backlog_tokens": r.backlog, "slo_deviation": 0.0, "busy_share": 0.0} for r in self.ranks]
        told = [{"dp_rank": n, "load": load, "group": self.group} for n, load in enumerate(loads)]
        status = {
            "enabled": True,
            "load": {**loads[0], "backlog_tokens": sum(r.backlog for r in self.ranks)},
            "pool": msgspec.to_builtins(self.pool),
        }
        size = {"dp_size": len(self.ranks) if self.by_room else 1} if self.tells else {}
        return web.json_response({**status, **size, **({"ranks": told} if self.each else {})})

    async def _loads(self, _: web.Request) -> web.Response:
        loads = [
            {"dp_rank": n, "num_waiting_uncached_tokens": r.backlog, "total_prefill_busy_us": 0}
            for n, r in enumerate(self.ranks)
        ]
        # Not in the order of ranks: the router must not rely on it.
        return web.json_response({"loads": loads[::-1]})

    async def _server_info(self, _: web.Request) -> web.Response:
        self.info_asked += 1
        if not self.tells:
            raise web.HTTPNotFound
        size = len(self.ranks)
        return web.json_response({"dp_size": 1, "attn_dp_size": size, "load_balance_method": self.method})

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        size, rooms = len(self.ranks), rooms_of(body)
        (number,) = {room % size for room in rooms} if self.by_room else {len(self.bodies) % size}
        rank = self.ranks[number]
        assert all(0 <= room < 1 << 63 for room in rooms)
        assert body.get("disagg_prefill_dp_rank", number) == number
        rank.served.append(body)
        tokens, text = prompt_tokens(body), str(body.get("text") or body.get("prompt") or "")
        key = f"{body.get('lora_path', '')}\n{text}"
        cached = rank.cached(key)
        self.asked_tokens += tokens
        self.cached_tokens += cached
        rank.backlog += tokens - cached
        try:
            async with rank.device:
                await self.gate.wait()
                await asyncio.sleep((tokens - cached) / self.tokens_per_s)
        finally:
            rank.backlog -= tokens - cached
        rank.hold(key)
        for room in rooms:
            self.world.event(room).set()
        meta = {"prompt_tokens": tokens, "cached_tokens": cached}
        return await answer(request, body, [{"text": "x", "meta_info": meta, "usage": meta}])


class TellingDecode(FakeDecode):
    """Decode server that reports its used KV tokens in /v1/loads, including those of other routers."""

    def __init__(self, world: World, capacity: int | None = 100_000, others: int = 0, ranks: int = 1) -> None:
        super().__init__(world)
        self.capacity, self.others, self.ranks = capacity, others, ranks
        self.asked = 0

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/loads", self._loads)

    async def _loads(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.capacity is None:
            raise web.HTTPNotFound
        n = self.ranks
        one: dict[str, Any] = {"num_total_tokens": self.others // n, "max_total_num_tokens": self.capacity // n}
        return web.json_response({"loads": [{"dp_rank": i, **one} for i in range(n)]})
