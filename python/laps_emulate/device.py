"""An emulated device: wraps the ``forward`` of a tiny model and makes each step last as its profile says.

As on CUDA, a forward pass only launches: steps queue on a timeline, and code that needs a result waits for its event
(``events``).
"""

from __future__ import annotations

import math
from typing import Any

from laps_core.latency.step import StepShape
from sglang_laps.passes.cutter import SliceOrder, StandIn

from laps_emulate.events import DeviceModule
from laps_emulate.record import Record
from laps_emulate.spec import DeviceSpec
from laps_emulate.timeline import Timeline

PREFILLS, DECODE, MIXED = ("EXTEND", "MIXED"), "DECODE", "MIXED"
"""Forward modes whose steps are emulated; steps of other modes take the time of the tiny model."""


class EmulatedDevice(StandIn):
    """Wraps one model runner's ``forward``. Runs long batches in slices as ``slices.Slices`` does: between layers and,
    if a layer lasts too long, between its operators. Attention cannot be divided."""

    def __init__(
        self,
        runner: Any,
        spec: DeviceSpec,
        timeline: Timeline | None = None,
        *,
        share: float = 1.0,
        waits: bool = False,
    ) -> None:
        """`share`: part of a whole step on this rank; pipeline stages have equal shares. `waits`: a pass ends with its
        step, because its output goes to another stage at once."""
        self.layers = spec.profile.layers
        """Layers of the model whose device is emulated."""
        self.operators = 4
        self.spec, self.waits = spec, waits
        self._profile = spec.profile.stretched(spec.slow * share)
        self.launch_s = self._profile.slices_launch_s
        self.record, self.decoded = Record(), Record()
        """Records of prefill steps, with and without decoded rows; and of decode steps."""
        self._timeline = timeline or Timeline()
        self._model = runner.forward
        self._lasted_s = 0.0
        """Sum over all steps so far."""
        runner.forward = self._forward

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of the device's Prometheus series."""
        return {"profile": self.spec.profile.name, "slow": f"{self.spec.slow:g}"}

    def module(self, real: Any) -> DeviceModule:
        """Return the device module for a scheduler. `real`: module of the device that the scheduler really runs on."""
        return DeviceModule(real, self._timeline)

    def status(self) -> dict[str, Any]:
        """Return the entry "emulated" of the server's status (JSON-ready)."""
        profile = self.spec.profile
        about = {"profile": profile.name, "source": profile.source, "slow": self.spec.slow}
        decode = {"decode": self.decoded.as_dict()} if self.decoded.steps else {}
        return {**about, **self.record.as_dict(), **decode}

    def _forward(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        armed = self.disarm()
        mode = forward_batch.forward_mode.name
        decodes = mode == DECODE and self._profile.decode is not None
        if not (decodes or mode in PREFILLS):
            return self._model(forward_batch, *args, **kwargs)
        shape: list[tuple[int, int]] = []
        if decodes:
            profile_s = self._profile.decode_s(forward_batch.batch_size, int(forward_batch.seq_lens_cpu.sum()))
        else:
            shape = list(zip(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu, strict=True))
            profile_s = self._prefill_s(shape, mixed=mode == MIXED)
        time, others_s = self._timeline, self._lasted_s
        called, begin = time.now(), time.begin()
        output = self._model(forward_batch, *args, **kwargs)
        model_s = time.now() - called
        if armed is None:
            # A decode step is launched as one graph.
            time.wait(called if decodes else called + self._profile.launch_s)
            time.book(called, profile_s, time.now())
        else:
            self._in_slices(called, profile_s, shape, armed)
        (self.decoded if decodes else self.record).add(profile_s, self._lasted(begin, others_s), model_s)
        if self.waits:
            time.wait(time.free)
        return output

    def _lasted(self, begin: float, others_s: float) -> float:
        """Return how long a step has lasted that started at `begin`, without the steps that ran in its pauses: they are
        recorded on their own. `others_s`: ``_lasted_s`` at its start."""
        lasted_s = self._timeline.free - begin - (self._lasted_s - others_s)
        self._lasted_s += lasted_s
        return lasted_s

    def _prefill_s(self, shape: list[tuple[int, int]], *, mixed: bool) -> float:
        """Return the time of a prefill step (seconds). `mixed`: rows of one token are decoded; each costs as much as a
        token of a chunk, plus the reading of its context."""
        cost = self._profile.decode
        if not mixed or cost is None:
            return self._profile.coefficients.seconds(StepShape.of(shape))
        contexts = [old + 1 for new, old in shape if new == 1]
        prompts = StepShape.of((new, old) for new, old in shape if new > 1)
        prompts = prompts._replace(tokens=prompts.tokens + len(contexts))
        return self._profile.coefficients.seconds(prompts) + cost.context * sum(contexts)

    def _in_slices(self, launched: float, profile_s: float, shape: list[tuple[int, int]], order: SliceOrder) -> None:
        """Book a pass in slices, whose launch started at `launched`. As on a GPU, the host is one slice ahead."""
        time, left_s, each_s = self._timeline, profile_s, profile_s * order.layers / self.layers
        ran, ended = time.now(), -math.inf
        for slice_s in self._profile.slices(profile_s, shape, each_s):
            left_s -= slice_s
            sent = launched + self.launch_s * slice_s / profile_s
            time.wait(sent)
            before, ended = ended, time.book(launched, slice_s, sent)
            launched = sent
            # No pause after a slice that ended while the tiny model ran.
            if left_s > 1e-9 * profile_s and ended > ran:
                time.wait(before)
                order.pause(round(self.layers * left_s / profile_s, 6))
                launched = time.now()
