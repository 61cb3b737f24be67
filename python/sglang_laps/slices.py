"""Long batches in slices of a few layers, with a pause between two slices in which other work may run (FlowPrefill).

SGLang has the mechanism: a forward batch in split-prefill mode runs some layers and keeps its activations. Here a whole
``ModelRunner.forward`` is made of such parts. To everything around it (sampling, streams, results) it is one forward
pass that takes long; what happens in the pauses is the caller's.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_laps.armed import Armed, Pause

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class Cutter(Protocol):
    """Runs passes of one model runner in slices."""

    layers: int
    """Of the model."""

    @property
    def free_s(self) -> float:
        """When the slice that is on the device should be over (seconds of ``time.perf_counter``): what is launched in
        its pause begins then. In the past = nothing is known to run."""
        ...

    @property
    def launch_s(self) -> float:
        """Host time (seconds) to launch a whole pass in slices, at its fastest; 0 = not known, or not apart."""
        ...

    def cut(self, layers: int, pause: Pause) -> AbstractContextManager[None]:
        """Run the next forward pass in slices of `layers`; `pause` is called between them."""
        ...


def why_not(scheduler: Scheduler, *, emulated: bool = False) -> str | None:
    """Why this server's long batches cannot be run in slices, or None. `emulated`: its model is not what is cut."""
    model = scheduler.tp_worker.model_runner.model
    checks = (
        (not (emulated or hasattr(model, "forward_split_prefill")), f"{type(model).__name__} has no split prefill"),
        (get_parallel().enable_dp_attention, "--enable-dp-attention: its ranks meet in every layer"),
        (not scheduler.spec_algorithm.is_none(), "speculative decoding"),
        (scheduler.enable_lora, "LoRA: another batch may replace the adapters of the paused one"),
        (scheduler.enable_pdmux, "--enable-pdmux uses split prefill itself"),
        (not scheduler.is_generation, "the model does not generate"),
    )
    return next((why for hit, why in checks if hit), None)


def fits(batch: ScheduleBatch) -> bool:
    """Whether this batch can be run in slices: token ids in, logits out."""
    return (
        batch.forward_mode == ForwardMode.EXTEND
        and batch.input_embeds is None
        and not batch.return_hidden_states
        and not any(r.multimodal_inputs is not None or r.positional_embed_overrides is not None for r in batch.reqs)
    )


class Slices(Armed):
    """Stands before one model runner's ``forward``."""

    def __init__(self, runner: Any) -> None:
        self.layers: int = runner.model_config.num_hidden_layers
        self._whole = runner.forward
        self.free_s = -math.inf
        self._launch_s = math.inf
        self._events = None if torch.device(runner.device).type == "cpu" else torch.get_device_module(runner.device)
        runner.forward = self._forward

    @property
    def launch_s(self) -> float:
        """Host time (seconds) to launch a whole pass in slices, at its fastest; 0 = not known, or not apart."""
        return 0.0 if self._events is None or math.isinf(self._launch_s) else self._launch_s

    def _forward(self, forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
        armed = self.disarm()
        if armed is None:
            return self._whole(forward_batch, *args, **kwargs)
        layers, pause = armed
        mode, forward_batch.forward_mode = forward_batch.forward_mode, ForwardMode.SPLIT_PREFILL
        sent: deque[Any] = deque()
        stale, ended = True, math.nan
        try:
            while True:
                # Attention metadata is one per backend: a batch that ran in the pause has left its own.
                kwargs.update(reinit_attn_backend=stale, split_forward_count=layers)
                begin, done = time.perf_counter(), forward_batch.split_index
                output = self._whole(forward_batch, *args, **kwargs)
                each_s = (time.perf_counter() - begin) / (forward_batch.split_index - done)
                self._launch_s = min(self._launch_s, each_s * self.layers)
                left = self.layers - forward_batch.split_index
                if left <= 0:
                    return output
                before, ended = ended, self._keep_pace(sent)
                if not stale and ended > before:
                    # As long as the one that is over, nothing else having run meanwhile.
                    self.free_s = ended + (ended - before)
                stale = pause(left)
        finally:
            forward_batch.forward_mode = mode

    def _keep_pace(self, sent: deque[Any]) -> float:
        """Let the host be one slice ahead of the device, and no more: preemption would come too late. When the slice
        before that was over (seconds); not a number = not known."""
        if self._events is None:
            return math.nan
        event = self._events.Event()
        event.record()
        sent.append(event)
        if len(sent) < 2:
            return math.nan
        sent.popleft().synchronize()
        return time.perf_counter()
