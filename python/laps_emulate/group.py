"""An emulated device of data-parallel attention ranks: all ranks run each step together, for as long as the slowest
rank takes."""

from __future__ import annotations

import math
from typing import Any

import torch
from laps_core.group.cost import GroupCost, OwnShape
from sglang_laps.passes.cutter import SliceOrder

from laps_emulate.device import PREFILLS, EmulatedDevice
from laps_emulate.spec import DeviceSpec
from laps_emulate.timeline import Timeline

IDLE = "IDLE"


class GroupDevice(EmulatedDevice):
    """Wraps one model runner's ``forward``, on every rank. A rank without a batch of its own runs an idle batch."""

    def __init__(self, runner: Any, spec: DeviceSpec, ranks: Any, timeline: Timeline | None = None) -> None:
        """`ranks`: CPU group of all ranks. The profile has a ``group``.

        Raises ValueError if the profile's devices cannot be divided among these ranks.
        """
        super().__init__(runner, spec, timeline)
        size = torch.distributed.get_world_size(ranks)
        cost = self._profile.with_ranks(size).group
        assert cost is not None
        self._cost: GroupCost = cost
        self._ranks = ranks
        self._told = torch.empty((size, 1 + len(OwnShape._fields)), dtype=torch.float64)

    def _forward(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        order = self.disarm()
        mode = forward_batch.forward_mode.name
        if mode not in (*PREFILLS, IDLE):
            return self._model(forward_batch, *args, **kwargs)
        lens = () if mode == IDLE else (forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu)
        shape = list(zip(*lens, strict=True))
        time, cost = self._timeline, self._cost
        told = torch.tensor([time.begin(), *cost.shape(shape)], dtype=torch.float64)
        torch.distributed.all_gather_into_tensor(self._told.view(-1), told, group=self._ranks)
        begins, *sums = self._told.T.tolist()
        shapes = [OwnShape(*map(int, one)) for one in zip(*sums, strict=True)]
        seconds = cost.seconds(shapes) if any(one.tokens for one in shapes) else 0.0
        called, begin, others_s = time.now(), max(begins), self._lasted_s
        output = self._model(forward_batch, *args, **kwargs)
        model_s = time.now() - called
        if order is None:
            time.book(begin, seconds, time.now())
        else:
            self._in_parts(begin, seconds, order)
        lasted_s = self._lasted(begin, others_s)
        if shape:
            self.record.add(seconds, lasted_s, model_s)
        return output

    def _in_parts(self, launched: float, seconds: float, order: SliceOrder) -> None:
        """Book a step in slices; all ranks come to each pause. As on a GPU, the host is one slice ahead."""
        time, ended = self._timeline, -math.inf
        ran = time.now()
        for i in range(1, order.parts + 1):
            sent = launched + self.launch_s / order.parts
            time.wait(sent)
            before, ended = ended, time.book(launched, seconds / order.parts, sent)
            if i < order.parts:
                time.wait(before)
                order.pause(self.layers * (1.0 - i / order.parts))
                # A slice that ended while the tiny model ran is followed by the next slice at once.
                launched = time.now() if ended > ran else ended
        time.book(ran, 0.0)
