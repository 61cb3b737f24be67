"""How long waiting work takes, and the sizes that follow: of a batch, a chunk, a slice."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from laps_core.config import ConfigError
from laps_core.latency.model import LatencyModel
from laps_core.policy.types import Waiting

TOKEN_S = 1e-4
"""Work of a token (seconds) while the latency model is not fitted; only orders use it."""
MOST_PARTS = 64
"""Slices of a layer."""
BATCH_TOKENS = 16384
"""SGLang's default for --max-prefill-tokens."""
REMEMBERED = 4096
"""Predicted times that are kept."""
LAUNCHES = 16
"""Latest launches of which the longest counts."""
PAUSES = 0.02
"""Share of a pass that its pauses may cost: where they cost more, slices are longer than ``slice_ms``."""
LONGEST_SLICE = 16.0
"""Times ``slice_ms``: no slice is meant to take longer, whatever its pause costs."""


class Sizes:
    """Sizes and times of one server. Lengths are tokens, times seconds."""

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
        """`chunk_tokens`: one batch's budget; None = no prompt is cut. Then `batch_tokens` is what a batch of several
        holds. `unit`: a cut prompt ends on a multiple of this.
        `layers`: of the model; 0 = no slices. `slice_s`: a long batch makes way about this often. `even`: no step is
        to take longer than a full chunk without history: a stage of a pipeline waits for the longest of its steps.

        Raises ConfigError where a chunk holds less than one unit.
        """
        if chunk_tokens is not None and chunk_tokens < unit:
            raise ConfigError(
                f"--chunked-prefill-size: {chunk_tokens} is less than {unit} tokens, what a cut is rounded to"
            )
        self.model = model
        self.chunk, self.unit, self.layers = chunk_tokens, unit, layers
        self.budget = chunk_tokens or 1 << 30
        """New tokens of a batch."""
        self._half = (chunk_tokens or batch_tokens) // 2
        self._even = even
        self.launch_s = 0.0
        """Host time to launch a whole pass in slices; 0 = not known, or nothing is launched."""
        self.pause_s = 0.0
        """Time that a pause costs a pass; 0 = not known, or the device computes meanwhile."""
        self._leads: deque[float] = deque(maxlen=LAUNCHES)
        self._slice_s = slice_s
        self._alone: dict[tuple[int, int], float] = {}
        self._alone_by: object = None
        """The coefficients that those were predicted with."""

    def launched(self, seconds: float) -> None:
        """From a decision until its batch, in one piece, was launched, the host took so long."""
        self._leads.append(seconds)

    # -- times

    @property
    def lead_s(self) -> float:
        """Longest time from a decision until its batch is launched; 0 = not known."""
        return max(self._leads, default=0.0)

    @property
    def fixed_s(self) -> float | None:
        """F: what a step costs whatever is in it; None = not known."""
        known = self.model.coefficients
        return None if known is None else known.overhead_s

    def work_s(self, w: Waiting) -> float:
        """Predicted time of what is left, in a batch of its own."""
        return self._alone_s(w.tokens, w.history)

    def lone_s(self, w: Waiting) -> float:
        """Predicted time of all of it, alone on the server."""
        whole = w.new_tokens or w.tokens
        return self._alone_s(whole, max(0, w.history - whole + w.tokens))

    def _alone_s(self, new: int, history: int) -> float:
        # Asked of every long prompt at each slice, and seldom new.
        if self._alone_by is not self.model.coefficients or len(self._alone) > REMEMBERED:
            self._alone, self._alone_by = {}, self.model.coefficients
        shape = new, history
        took = self._alone.get(shape)
        if took is None:
            took = self._alone[shape] = self.model.predict([shape]) or new * TOKEN_S
        return took

    def batch_s(self, items: Iterable[Waiting]) -> float:
        """Predicted time of a batch of these; 0 = unknown."""
        return self.model.predict([(w.tokens, w.history) for w in items]) or 0.0

    def beside_s(self, w: Waiting) -> float:
        """Predicted time of what is left, beside others in a batch."""
        known = self.model.coefficients
        hidden_s = 0.0 if known is None else known.hidden_s(w.tokens)
        return max(0.0, self.work_s(w) - (self.fixed_s or 0.0) + hidden_s)

    def weight(self, items: Iterable[Waiting]) -> float:
        """Return the slowdown added by a second that all of them wait, summed (1/seconds)."""
        return sum(1.0 / self.lone_s(w) for w in items)

    def weights(self, picked: Iterable[Waiting], everybody: Iterable[Waiting]) -> tuple[float, float]:
        """Return the weights of those picked, and of all others."""
        mine = self.weight(picked)
        return mine, self.weight(everybody) - mine

    # -- sizes

    def whole_units(self, tokens: int) -> int:
        """Rounded up."""
        return -(-tokens // self.unit) * self.unit

    def joining(self, items: Iterable[Waiting]) -> int:
        """Return the new tokens that these take of a batch they join, each rounded up to whole units."""
        return sum(self.whole_units(w.tokens) for w in items)

    def preempting_budget(self, threshold: int) -> int:
        """New tokens of a batch that preempts: half a chunk. Then its activations and those of what is paused, which
        are two tensors of hidden states, are less than SGLang has set aside for one whole chunk."""
        return max(threshold, self._half)

    def timely_chunk(self, first: Waiting, joining: int, gap_s: float) -> int:
        """Without slices: the largest chunk that takes no longer than the gap, in whole units, at least one (Medha).

        What a chunk costs however small it is, a step's fixed time and its long history read once more, does not
        count, and is never more than half of it. `joining`: tokens of short requests in the same step.

        In a pipeline the step as a whole takes no longer than a full chunk without history, with the same exception.
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
        """Layers that take about ``slice_ms``, and in how many slices each is run where one takes longer; 0 layers: the
        batch is too small to be worth a pause.

        Or the device would wait for the host: layer by layer a pass is launched without SGLang's prefill graphs.
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
        # As many parts as it takes, but for those that the host could not launch in time.
        parts = math.ceil(took / max(slice_s, self.launch_s / self.layers) / self.layers - 1e-9)
        return max(1, min(self.layers, int(slice_s * self.layers / took))), min(max(1, parts), MOST_PARTS)
