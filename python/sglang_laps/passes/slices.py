"""Long batches in slices, with a pause between two slices in which other work can run (FlowPrefill).

The model's own forward pass runs. Wrappers before its layers and operators count the finished work, and call the pause
in the middle of the pass when a slice is over. For the code around it (sampling, streams, results) this is one forward
pass that takes long. The caller decides what happens in a pause.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from laps_core.slicing import Cut, Even, Operator, pairs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.runtime_context import get_forward

from sglang_laps.passes.cutter import Abandoned, Cutter, SliceOrder
from sglang_laps.passes.layers import decoder_layers, encoder_points, points
from sglang_laps.passes.no_slices import encodes_layer_by_layer, why_not
from sglang_laps.passes.put_back import aside, put_back, restored_flags, save_state
from sglang_laps.temporarily import temporarily

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

ROWS_APART = {None, "awq", "awq_marlin", "gptq", "gptq_marlin"}
"""Quantizations that leave activations alone. Scales over all rows would make results depend on the blocks of rows, and
on the padded rows of a graph."""
STAGES = "model_forward_stages"
"""SGLang function, in modules of models, that runs layers for two parts of a batch at once."""
SHORTER, LONGER = 0.94, 1.02
"""Factors by which the estimated cost of a pause moves after a shorter and after a longer pause, so that it settles
where a quarter of the pauses are shorter. A mean would include the time that other processes take from a busy core."""


class _Pass:
    """State of one forward pass in slices. ``order`` gives the size or the number of slices."""

    def __init__(
        self, batch: Any, everything: Operator, layers: int, order: SliceOrder, loops: int, graphs: Any
    ) -> None:
        """`graphs`: the runner's prefill graphs, which the pass does without."""
        # A rank without requests runs an idle batch beside the other ranks.
        shape = list(zip(batch.extend_seq_lens_cpu or (), batch.extend_prefix_lens_cpu or (), strict=True))
        self.tokens, self.pairs = sum(new for new, _ in shape), pairs(shape)
        self.batch, self.pause = batch, order.pause
        # The work differs from rank to rank, so ranks that run a pass together cut it by layers alone.
        self.even = Even(loops * layers, order.parts) if order.parts else None
        self.total = loops * (float(layers) if self.even else everything.cost(self.tokens, self.pairs))
        self.cut = Cut(order.layers / layers * self.total)
        self.sent: deque[Any] = deque()
        self.graphs = graphs
        self.resumed, self.since = time.perf_counter(), 0.0


class NoResult:
    """Zeros instead of the result of a pass that ended in a pause, in the format that SGLang expects of every pass."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        spec = runner.spec_algorithm
        self._followed = not (spec.is_none() or spec.is_standalone())
        """True if a draft model reads the hidden states, whose width depends on both models."""
        self._width = 0

    @property
    def known(self) -> bool:
        return self._width > 0 or not self._followed

    def learn(self, output: Any) -> None:
        """Learn the width of the hidden states from the result of a whole pass."""
        states = output.logits_output.hidden_states if self._followed else None
        if states is not None:
            self._width = states.shape[-1]

    def of(self, forward_batch: Any) -> ModelRunnerOutput:
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


class Slices(Cutter):
    """Wrapper of one model runner's ``forward``, and of the operators of its model."""

    def __init__(self, runner: Any) -> None:
        """Raise NoLayers if the model has no layers to pause between."""
        stack = decoder_layers(runner.model)
        self.layers = len(stack)
        self._runner, self._whole = runner, runner.forward
        self._loops = 1
        """How often a pass runs all layers; known after the first pass in slices."""
        self._events = None if torch.device(runner.device).type == "cpu" else torch.get_device_module(runner.device)
        self._pass: _Pass | None = None
        self._name, self._warned = type(runner.model).__name__, False
        self._no_result = NoResult(runner)
        blocks = runner.model_config.quantization in ROWS_APART and runner.lora_manager is None
        found = [p for layer in stack for p in points(layer, blocks=blocks)]
        self.operators = len(found) // self.layers
        self._all = Operator(sum(p.operator.tokens for p in found), sum(p.operator.attention for p in found))
        layers = set(map(id, stack))
        for module, operator in found:
            run = self._in_blocks if operator.divisible else partial(self._run_whole, enters=id(module) in layers)
            # A torch hook would cost every pass, in slices or not, ten times as much.
            module.forward = partial(run, module.forward, operator)
        if encodes_layer_by_layer(runner):
            for module, operator in encoder_points(runner.model):
                module.forward = partial(self._encode, module.forward, operator)
        for name in {of.__module__ for m in runner.model.modules() for of in type(m).__mro__}:
            if (run_stages := getattr(sys.modules[name], STAGES, None)) is not None:
                setattr(sys.modules[name], STAGES, partial(self._in_stages, run_stages))
        runner.forward = self._forward
        runner.eager_runner.load_batch = partial(self._load_batch, runner.eager_runner.load_batch)

    @property
    def abandons(self) -> bool:
        """See ``Cutter``."""
        return self._no_result.known

    def _forward(self, forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
        armed = self.disarm()
        if armed is None:
            output = self._whole(forward_batch, *args, **kwargs)
            self._no_result.learn(output)
            return output
        now = _Pass(forward_batch, self._all, self.layers, armed, self._loops, self._runner.prefill_cuda_graph_runner)
        # Without prefill graphs: a graph replay calls no modules.
        try:
            with self._current_pass(now, None), restored_flags():
                output = self._whole(forward_batch, *args, **kwargs)
        except Abandoned:
            return self._no_result.of(forward_batch)
        done = (now.even or now.cut).done
        self._loops = max(1, round(self._loops * done / (now.total or 1.0)))
        if not done and not self._warned:
            self._warned = True
            logger.warning("LAPS: %s does not call its layers as modules: long batches do not pause.", self._name)
        return output

    @contextmanager
    def _current_pass(self, now: _Pass | None, graphs: Any) -> Iterator[None]:
        """Make `now` the pass in slices, and `graphs` the runner's prefill graphs, while the context lasts."""
        with temporarily(self, _pass=now), temporarily(self._runner, prefill_cuda_graph_runner=graphs):
            yield

    def _load_batch(self, load: Callable[..., Any], forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
        """Keep a pass in slices out of SGLang's shared buffers, which a batch in a pause would overwrite."""
        now = self._pass
        if now is None:
            return load(forward_batch, *args, **kwargs)
        now.batch = replace(forward_batch)
        return now.batch

    # -- before the operators

    def _run_whole(
        self, whole: Callable[..., Any], operator: Operator, /, *args: Any, enters: bool, **kwargs: Any
    ) -> Any:
        """Pause if due, then run a whole operator. `enters`: a layer starts with this operator."""
        # Also called while a graph is captured or compiled; then no pass in slices is under way.
        now = self._pass
        if now is not None:
            if now.even is None:
                self._count(now, operator)
            elif enters and now.even.count_layer():
                self._run_pause(now, now.even.done - 1)
        return whole(*args, **kwargs)

    def _in_stages(self, whole: Callable[..., Any], *, layers: Any, hidden_states: Any, **kwargs: Any) -> Any:
        """Run layers for two parts of a batch at once (--enable-two-batch-overlap), with pauses. Before a pause both
        parts have passed all layers up to there."""
        now, begin = self._pass, 0
        if now is None or now.even is None:
            return whole(layers=layers, hidden_states=hidden_states, **kwargs)
        for i in range(len(layers)):
            if now.even.count_layer():
                if i > begin:
                    hidden_states = whole(layers=layers[begin:i], hidden_states=hidden_states, **kwargs)
                self._run_pause(now, now.even.done - 1)
                begin = i
        return whole(layers=layers[begin:], hidden_states=hidden_states, **kwargs)

    def _in_blocks(self, whole: Callable[..., Any], operator: Operator, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a dense MLP in blocks of rows. A pause between blocks holds none of the MLP's widest activations."""
        now = self._pass
        if now is None or now.even is not None:
            return whole(x, *args, **kwargs)
        more = [*args, *kwargs.values()]
        rows_apart = isinstance(x, torch.Tensor) and not any(isinstance(v, torch.Tensor) for v in more)
        if not rows_apart or get_forward().mlp_reduce_scatter:
            self._count(now, operator)
            return whole(x, *args, **kwargs)
        n = now.cut.blocks(operator.cost(now.tokens, now.pairs), len(x))
        done = []
        for block in x.tensor_split(n):
            self._count(now, operator, 1.0 / n)
            done.append(whole(block, *args, **kwargs))
        return done[0] if n == 1 else torch.cat(done)

    def _encode(self, whole: Callable[..., Any], operator: Operator, /, *args: Any, **kwargs: Any) -> Any:
        """Pause if due, then run a layer of an encoder."""
        now = self._pass
        if now is not None and now.even is None:
            x = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
            if now.cut.count_encoder_layer(0.0 if x is None else operator.cost(x.numel() // x.shape[-1], 0)):
                self._run_pause(now, now.cut.done)
        return whole(*args, **kwargs)

    def _count(self, now: _Pass, operator: Operator, share: float = 1.0) -> None:
        before = now.cut.done
        if now.cut.count_operator(share * operator.cost(now.tokens, now.pairs)):
            self._run_pause(now, before)

    def _run_pause(self, now: _Pass, done: float) -> None:
        """Pause between two slices. ``done``: cost of the operators so far."""
        launch_s = time.perf_counter() - now.resumed
        self._keep_pace(now.sent)
        begin, before = time.perf_counter(), save_state(now.batch)
        with self._current_pass(None, now.graphs), aside(self._runner):
            others_ran = now.pause(round(self.layers * max(0.0, 1.0 - done / now.total), 6))
        if others_ran:
            put_back(self._runner, now.batch, before)
        elif done > now.since:
            pause_s = time.perf_counter() - begin
            if self._events is not None:
                launch_s = (launch_s + pause_s) * now.total / (done - now.since)
                self.launch_s = min(self.launch_s or launch_s, launch_s)
            elif now.since:  # the first pause of a pass processes earlier results, which is no cost of pausing
                self.pause_s = self.pause_s * (SHORTER if pause_s < self.pause_s else LONGER) or pause_s
        now.since, now.resumed = done, time.perf_counter()

    def _keep_pace(self, sent: deque[Any]) -> None:
        """Let the host be at most one slice ahead of the device; further ahead, preemption would come too late."""
        if self._events is None:
            return
        event = self._events.Event()
        event.record()
        sent.append(event)
        if len(sent) > 1:
            sent.popleft().synchronize()


def cutter(scheduler: Scheduler, emulated: Cutter | None, *, together: bool) -> Cutter | str:
    """Return the cutter of this server's long batches, or the reason why there is none. Arguments: see ``why_not``."""
    reason = why_not(scheduler, emulated, together=together)
    return reason or emulated or Slices(scheduler.tp_worker.model_runner)
