"""How an emulated device gets into a scheduler process, LAPS or stock."""

from __future__ import annotations

import logging
from typing import Any

from sglang_laps import seams
from sglang_laps.emulation.asked import ENV, Asked
from sglang_laps.emulation.device import EmulatedDevice
from sglang_laps.emulation.group import GroupDevice
from sglang_laps.support import refuse, resolved

logger = logging.getLogger(__name__)

WORKER = "managers.scheduler.Scheduler.init_model_worker"
OVERLAP = "managers.scheduler.Scheduler.init_overlap"
RUN = "managers.scheduler.Scheduler.run_batch"
STATE = "managers.scheduler.Scheduler.get_internal_state"


def install(asked: Asked) -> None:
    """Register the hooks. Call while plugins are being loaded in a scheduler process."""

    def loaded(result: Any, scheduler: Any) -> Any:
        from sglang.srt.runtime_context import get_parallel

        if reason := asked.why_not(resolved(scheduler.server_args)):
            refuse(f"{ENV}: {reason}")
        runner = scheduler.tp_worker.model_runner
        parallel = get_parallel()
        if asked.profile.group is None:
            stages = parallel.pp_size
            scheduler.laps_emulated = EmulatedDevice(runner, asked, share=1.0 / stages, waits=stages > 1)
        elif parallel.attn_dp_size != parallel.tp_size:
            refuse(f"{ENV}: {asked.profile.name} is of data-parallel attention ranks: --dp-size is to be --tp-size")
        else:
            try:
                scheduler.laps_emulated = GroupDevice(runner, asked, scheduler.tp_cpu_group)
            except ValueError as e:
                refuse(f"{ENV}: {e}")
        leave_out_attention(runner.attn_backend)
        return result

    def events(result: Any, scheduler: Any) -> Any:
        scheduler.device_module = scheduler.laps_emulated.module(scheduler.device_module)
        return result

    def launched(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        # Without the overlap loop SGLang waits for a result where it reads it, and there is nothing to wait for here.
        if result.copy_done is None:
            result.copy_done = scheduler.device_module.Event()
            result.copy_done.record()
        return result

    def state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result.internal_state.update(status(scheduler))
        return result

    logger.warning(asked.warning())
    seams.hook(WORKER, loaded, "AFTER")
    seams.hook(OVERLAP, events, "AFTER")
    seams.hook(RUN, launched, "AFTER")
    seams.hook(STATE, state, "AFTER")


def device_of(scheduler: Any) -> EmulatedDevice | None:
    """The device that this scheduler's is emulated by, if it is."""
    return getattr(scheduler, "laps_emulated", None)


def status(scheduler: Any) -> dict[str, Any]:
    """The entry "emulated" of a status; empty for a real device."""
    device = device_of(scheduler)
    return {} if device is None else {"emulated": device.status()}


def leave_out_attention(backend: Any) -> None:
    """Have an attention backend compute nothing: on CPUs it computes a chunk over its whole prefix, far more than a
    step may take. What comes out of an emulated device means nothing; keys and values are written, kept and sent as
    ever."""
    # The host platform computes some kinds by itself, latent attention among them.
    backend._left_out = lambda *_: False
    backend._run_sdpa_forward_extend = backend._run_sdpa_forward_decode = _no_attention


def _no_attention(query: Any, output: Any, *_: Any, **__: Any) -> Any:
    return output.zero_()
