"""Fields of a stock scheduler that LAPS touches, without SGLang's own: for tests that need no server."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from laps_core.config import LapsConfig
from laps_core.scheduling.pacer import Pacer
from sglang_laps.classes import Classes, Tag
from sglang_laps.core import LapsCore

from .adders import Alone, Loads, builder


class Request:
    """A request as far as the swap looks at it: `done` of `tokens` are computed. Compared by identity."""

    def __init__(self, rid: str, tokens: int = 300, done: int = 0) -> None:
        self.rid, self.seqlen, self.full_untruncated_fill_ids = rid, tokens, range(tokens)
        self.prefix_len = self.extend_end = done
        self.priority = None
        self.laps_tag = Tag(0.0, 0.0, None, new_tokens=tokens, looked=0)

    def __repr__(self) -> str:
        return self.rid


class Fields:
    """Fields of the stock scheduler that LAPS touches, and LAPS over them."""

    enable_staging = False
    enable_overlap = False
    chunked_prefill_size = 512
    max_total_num_tokens = 4096

    def __init__(
        self,
        queue: list[Request],
        held: Request | None = None,
        parked: Sequence[Request] = (),
        stock: Any = lambda _: None,
        loads: Any = None,
    ) -> None:
        self.waiting_queue, self.chunked_req = queue, held
        self.load_inquirer: Any = loads or Loads()
        self._pending_chunked_abort_req: Any = None
        core = laps_core()
        core.parked = list(parked)
        pauses = SimpleNamespace(in_flight=list, adapters=set)
        self.laps: Any = SimpleNamespace(core=core, builder=builder(self, core, stock), interlude=pauses, ranks=Alone())

    @property
    def in_progress(self) -> list[Any]:
        """Prompts between two of their chunks."""
        found: list[Any] = self.laps.core.lines([], self.chunked_req).begun
        return found


def laps_core() -> LapsCore:
    classes = Classes(LapsConfig(), 256, lambda _: 0, lambda: 0.0)
    return LapsCore(Pacer(LapsConfig(), chunk_tokens=512), classes)
