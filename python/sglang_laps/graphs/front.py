"""Stand-in for ModelRunner's prefill graph runner: a full graph if that is faster, else the stock runner."""

from __future__ import annotations

from collections import Counter
from typing import Any

from laps_core.ladder import Ladder
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


class PrefillFront:
    """Choice of the runner for each batch. Only the batch and the ladder decide, so all ranks decide the same.

    ``stock``: SGLang's own runner (for graphs, or eager), or None. ``full``: the runner with the ladder's graphs.
    """

    def __init__(self, stock: Any, full: Any, ladder: Ladder, capture: dict[str, float]) -> None:
        self.stock, self.full, self.ladder, self._capture = stock, full, ladder, capture
        self._rows: int | None = None
        self._why: Counter[str] = Counter()
        self._hits: Counter[int] = Counter()
        self.replayed = self._padded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stock"], name)

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        """Return True if a full graph or the stock graphs run this batch."""
        self._rows = self._choose(forward_batch)
        return self._rows is not None or (self.stock is not None and bool(self.stock.can_run_graph(forward_batch)))

    def execute(self, forward_batch: ForwardBatch, **kwargs: Any) -> Any:
        """Run the batch that ``can_run_graph`` has just accepted."""
        rows, self._rows = self._rows, None
        if rows is None:
            return self.stock.execute(forward_batch, **kwargs)
        self._hits[rows] += 1
        self.replayed += 1
        self._padded += rows - len(forward_batch.input_ids)
        return self.full.execute(forward_batch, **kwargs)

    def _choose(self, forward_batch: ForwardBatch) -> int | None:
        new = forward_batch.extend_seq_lens_cpu
        # Other forward modes have attention metadata of their own.
        if forward_batch.forward_mode != ForwardMode.EXTEND or new is None or not self.ladder.admits(new):
            return None
        rows, why = self.ladder.choose(new)
        if rows is not None and not self.full.can_run_graph(forward_batch):
            rows, why = None, "unsupported"
        self._why[why] += 1
        return rows

    def status(self) -> dict[str, Any]:
        """Return counters since start, JSON-ready. ``batches``: batches that L and B admit; rows are tokens."""
        batches, replayed, rows = self._why.total(), self.replayed, sum(n * hits for n, hits in self._hits.items())
        return {
            "on": True, "row_counts": list(self.ladder.rows), "faster": sorted(self.ladder.faster), **self._capture,
            "batches": batches, "replayed": replayed, "hit_rate": round(replayed / max(1, batches), 4),
            "rows": rows, "padded_rows": self._padded, "padded_share": round(self._padded / max(1, rows), 4),
            "why": dict(self._why), "hits": {str(n): self._hits[n] for n in sorted(self._hits)},
        }  # fmt: skip
