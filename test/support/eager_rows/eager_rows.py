"""Prefill batches that carry rows whenever they can.

A row reads the weights only once on a GPU, but is computed on a CPU, so rows seldom pay here. With this folder in
PYTHONPATH the module is a plugin of SGLang: rows cost nothing, and a part of a long prompt that carries rows always
pays. Only the choice changes, not what LAPS does with it.
"""

from __future__ import annotations

from laps_core.policy import together
from laps_core.policy.decode import Decode
from laps_core.policy.predict import Sizes

COST = 0.001
"""Predicted time of the rows, in multiples of the time of a decode step."""


def _cheap_rows_s(self: Decode, sizes: Sizes) -> float:
    return COST * self.step_s if self._context is not None and self.streams else float("inf")


def load() -> None:
    """Replace the predicted cost of rows and the comparison with slices."""
    assert hasattr(Decode, "rows_s")
    assert hasattr(together, "gain")
    Decode.rows_s = _cheap_rows_s  # type: ignore[method-assign]
    together.gain = lambda *_: 1.0
