"""Scheduler state of LAPS (``LapsCore``) without SGLang, and requests for it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from laps_core.config import LapsConfig
from laps_core.length import LONG
from laps_core.policy.pacer import Pacer
from sglang_laps.classes import Classes, Tag
from sglang_laps.core import LapsCore
from sglang_laps.flights import Flight


class Request:
    """Request with the fields that the core reads; `done` of `tokens` are computed. Compared by identity."""

    def __init__(self, rid: str, tokens: int = 300, done: int = 0, priority: int | None = None) -> None:
        self.rid, self.seqlen, self.full_untruncated_fill_ids = rid, tokens, range(tokens)
        self.prefix_len = self.extend_end = done
        self.priority = priority
        self.laps_tag = Tag(0.0, 0.0, None, new_tokens=tokens, looked=0)

    def __repr__(self) -> str:
        return self.rid


def make_requests(*names: str) -> list[Any]:
    return [Request(name) for name in names]


def make_core(parked: Sequence[Any] = (), **more: Any) -> LapsCore:
    classes = Classes(LapsConfig(), 256, lambda _: 0, lambda: 0.0)
    core = LapsCore(Pacer(LapsConfig(), chunk_tokens=512, layers=28), classes, **more)
    core.chunked.parked = list(parked)
    return core


def make_flight(core: LapsCore, cut: Any = None, **more: Any) -> Flight:
    return Flight(cls=LONG, shape=[(400, 0)], batch=None, reqs=[Request("x", 400)], cut=cut, **more)


def make_batch(*reqs: Any) -> Any:
    lens = [r.seqlen - r.prefix_len for r in reqs]
    return SimpleNamespace(reqs=list(reqs), extend_lens=lens, prefix_lens=[r.prefix_len for r in reqs])
