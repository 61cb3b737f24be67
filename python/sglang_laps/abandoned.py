"""Placeholder result of a forward pass that ended in a pause, in the format that SGLang expects of every pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.model_runner import ModelRunnerOutput


class NoResult:
    """Zeros instead of one model runner's results."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        spec = runner.spec_algorithm
        self._followed = not (spec.is_none() or spec.is_standalone())
        """True if a draft model reads the hidden states, whose width depends on both models."""
        self._width = 0

    @property
    def known(self) -> bool:
        """Return True if the shape of a result is known."""
        return self._width > 0 or not self._followed

    def learn(self, output: Any) -> None:
        """Learn the width of the hidden states from the result of a whole pass."""
        states = output.logits_output.hidden_states if self._followed else None
        if states is not None:
            self._width = states.shape[-1]

    def of(self, forward_batch: Any) -> ModelRunnerOutput:
        """Return the zeros for this batch."""
        runner = self._runner
        shape = forward_batch.batch_size, runner.model_config.vocab_size
        logits = LogitsProcessorOutput(torch.zeros(shape, device=runner.device), None)
        if self._followed:
            zeros = partial(torch.zeros, dtype=runner.dtype, device=runner.device)
            tokens = len(forward_batch.input_ids)
            logits.hidden_states = zeros((tokens, self._width))
            if forward_batch.contains_mm_inputs():
                # A draft model does not encode pictures, video or sound itself.
                logits.mm_input_embeds = zeros((tokens, runner.model_config.hidden_size))
        return ModelRunnerOutput(logits, False)
