"""Predicted times of waiting work, and the sizes that follow from them: of a batch, a chunk, a slice."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from laps_core.config import ConfigError
from laps_core.latency.model import LatencyModel
from laps_core.length import whole_units
from laps_core.policy.types import Waiting

TOKEN_S = 1e-4
"""Assumed work of a token (seconds) while the latency model is not fitted."""
MOST_PARTS = 64
"""Most slices per layer."""
BATCH_TOKENS = 16384
"""SGLang's default for --max-prefill-tokens."""
REMEMBERED = 4096
"""Most predicted times that are kept."""
LAUNCHES = 16
"""Number of latest launches, of which the longest counts."""
PAUSES = 0.02
"""Share of a pass that its pauses may cost (0..1): if pauses cost more, slices are longer than ``slice_ms``."""
LONGEST_SLICE = 16.0
"""Longest intended slice, in multiples of ``slice_ms``, whatever its pause costs."""
STANDSTILL = 4.0
"""Multiple of its expected time that a step can take; beyond that the host stood still, say while a virtual machine was
moved."""


def without_standstill(took_s: float, expected_s: float | None) -> float:
    """Return a measured time without the time in which the host stood still (seconds). `expected_s`: None if
    unknown."""
    return took_s if expected_s is None else min(took_s, STANDSTILL * expected_s)


class Sizes:
    """Sizes and times of one server. Lengths are tokens, times are seconds."""

    def __init__(
        self,
        model: LatencyModel,
        *,
        chunk_tokens: int | None,
        unit: int,
        layers: int,
        slice_s: float,
        batch_tokens: int = BATCH_TOKENS,
        even: bool = False,
    ) -> None:
        """`chunk_tokens`: token budget of a batch; None: no prompt is cut. Then `batch_tokens` is the token budget of a
        batch of several prompts. `unit`: a cut prompt ends on a multiple of this. `layers`: layers of the model; 0: no
        slices. `slice_s`: intended time of a slice. `even`: no step should take longer than a full chunk without
        history, because a pipeline stage waits for the longest of its steps.

        Raises ConfigError if a chunk holds less than one unit.
        """
        if chunk_tokens is not None and chunk_tokens < unit:
            raise ConfigError(f"--chunked-prefill-size: {chunk_tokens} is less than {unit} tokens, the unit of a chunk")
        self.model = model
        self.chunk, self.unit, self.layers = chunk_tokens, unit, layers
        self.budget = chunk_tokens or 1 << 30
        """Token budget of a batch."""
        self._half = (chunk_tokens or batch_tokens) // 2
        self._even = even
        self.launch_s = 0.0
        """Host time to launch a whole pass in slices; 0 if unknown, or if nothing is launched."""
        self.pause_s = 0.0
        """Time that a pause adds to a pass; 0 if unknown, or if the device computes meanwhile."""
        self._leads: deque[float] = deque(maxlen=LAUNCHES)
        self._slice_s = slice_s
        self._alone: dict[tuple[int, int], float] = {}
        self._alone_by: object = None
        """Coefficients that predicted the times in `_alone`."""

    def record_launch_time(self, seconds: float) -> None:
        """Record the host time from a decision until its batch was launched in one piece."""
        self._leads.append(seconds)

    # -- times

    @property
    def lead_s(self) -> float:
        """Longest recent time from a decision until its batch is launched; 0 if unknown."""
        return max(self._leads, default=0.0)

    @property
    def fixed_s(self) -> float | None:
        """F, the fixed time of a step; None if unknown."""
        known = self.model.coefficients
        return None if known is None else known.overhead_s

    def work_s(self, w: Waiting) -> float:
        """Return the predicted time of the tokens left, in a batch of their own."""
        return self._alone_s(w.tokens, w.history)

    def lone_s(self, w: Waiting) -> float:
        """Return the predicted time of the whole request, alone on the server."""
        whole = w.new_tokens or w.tokens
        return self._alone_s(whole, max(0, w.history - whole + w.tokens))

    def _alone_s(self, new: int, history: int) -> float:
        # Called for every long prompt at each slice, mostly with lengths seen before.
        if self._alone_by is not self.model.coefficients or len(self._alone) > REMEMBERED:
            self._alone, self._alone_by = {}, self.model.coefficients
        shape = new, history
        took = self._alone.get(shape)
        if took is None:
            took = self._alone[shape] = self.model.predict([shape]) or new * TOKEN_S
        return took

    def batch_s(self, items: Iterable[Waiting]) -> float:
        """Return the predicted time of a batch of these requests; 0 if unknown."""
        return self.model.predict([(w.tokens, w.history) for w in items]) or 0.0

    def beside_s(self, w: Waiting) -> float:
        """Return the predicted time that the tokens left add to a batch of other requests."""
        known = self.model.coefficients
        hidden_s = 0.0 if known is None else known.hidden_s(w.tokens)
        return max(0.0, self.work_s(w) - (self.fixed_s or 0.0) + hidden_s)

    def weight(self, items: Iterable[Waiting]) -> float:
        """Return the sum of slowdowns that one second of waiting adds to all of these requests (1/seconds)."""
        return sum(1.0 / self.lone_s(w) for w in items)

    def weights(self, picked: Iterable[Waiting], all_waiting: Iterable[Waiting]) -> tuple[float, float]:
        """Return the weight of the picked requests, and of all other requests."""
        mine = self.weight(picked)
        return mine, self.weight(all_waiting) - mine

    # -- sizes

    def whole_units(self, tokens: int) -> int:
        return whole_units(tokens, self.unit)

    def joining(self, items: Iterable[Waiting]) -> int:
        """Return the new tokens that joining requests take of a batch, each request rounded up to whole units."""
        return sum(self.whole_units(w.tokens) for w in items)

    def preempting_budget(self, threshold: int) -> int:
        """Return the token budget of a preempting batch: half a chunk, or `threshold` if larger. Its activations and
        those of the paused batch (two tensors of hidden states) then need less than SGLang reserves for a chunk."""
        return max(threshold, self._half)

    def timely_chunk(self, first: Waiting, joining: int, gap_s: float) -> int:
        """Return the largest chunk, without slices, that takes at most the gap: whole units, at least one (Medha).

        The cost of even the smallest chunk (a step's fixed time, and reading the long history once more) does not
        count, and is at most half of the chunk's time. `joining`: tokens of short requests in the same step.

        In a pipeline the whole step takes no longer than a full chunk without history, with the same exception.
        """
        full = max(1, (self.budget - joining) // self.unit)
        predict, least_s = self.model.predict, self.model.predict([(0, first.history)]) or 0.0
        limit_s = max(gap_s, least_s)
        step_s = max(predict([(self.budget, 0)]) or 0.0, 2.0 * least_s) if self._even else math.inf
        joined = [(joining, 0)] if joining else []

        def too_long(units: int) -> bool:
            chunk = units * self.unit, first.history
            took, step = predict([chunk]), predict([chunk, *joined])
            return took is not None and step is not None and (took - least_s > limit_s or step > step_s)

        return max(1, bisect_left(range(1, full + 1), True, key=too_long)) * self.unit

    def slice_layers(self, longs: Sequence[Waiting], tokens: int) -> tuple[int, int]:
        """Return the layers that take about ``slice_ms``, and the slices per layer if one layer takes longer. 0 layers:
        the batch is too small to be worth a pause.

        Slices are launched layer by layer, without SGLang's prefill graphs: a small batch would wait for the host.
        """
        if not self.layers or not longs:
            return 0, 1
        shape, room = [], tokens
        for w in longs:
            shape.append((min(w.tokens, room), w.history))
            room -= shape[-1][0]
        took = self.model.predict(shape)
        if took is None:
            return 1, 1
        slice_s = max(self._slice_s, min(self.pause_s / PAUSES, LONGEST_SLICE * self._slice_s))
        if took <= 2.0 * max(self._slice_s, self.launch_s):
            return 0, 1
        # As many parts as needed, but no more than the host can launch in time.
        parts = math.ceil(took / max(slice_s, self.launch_s / self.layers) / self.layers - 1e-9)
        return max(1, min(self.layers, int(slice_s * self.layers / took))), min(max(1, parts), MOST_PARTS)
