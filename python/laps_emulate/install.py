"""Put an emulated device into a scheduler process, LAPS or stock."""

from __future__ import annotations

import logging
from typing import Any

from sglang_laps.passes.cutter import stand_in_status
from sglang_laps.seams import hook
from sglang_laps.support import refuse, resolved

from laps_emulate.device import EmulatedDevice
from laps_emulate.group import GroupDevice
from laps_emulate.seams import SEAMS
from laps_emulate.spec import ENV, DeviceSpec

logger = logging.getLogger(__name__)

WORKER = "managers.scheduler.Scheduler.init_model_worker"
OVERLAP = "managers.scheduler.Scheduler.init_overlap"
RUN = "managers.scheduler.Scheduler.run_batch"
STATE = "managers.scheduler.Scheduler.get_internal_state"


def install(spec: DeviceSpec) -> None:
    """Register the hooks. Call it while SGLang loads plugins in a scheduler process."""

    def loaded(result: Any, scheduler: Any) -> Any:
        from sglang.srt.runtime_context import get_parallel

        if reason := spec.why_not(resolved(scheduler.server_args)):
            refuse(f"{ENV}: {reason}")
        runner = scheduler.tp_worker.model_runner
        parallel = get_parallel()
        if spec.profile.group is None:
            stages = parallel.pp_size
            scheduler.laps_emulated = EmulatedDevice(runner, spec, share=1.0 / stages, waits=stages > 1)
        elif parallel.attn_dp_size != parallel.tp_size:
            refuse(f"{ENV}: {spec.profile.name} needs --dp-size equal to --tp-size")
        else:
            try:
                scheduler.laps_emulated = GroupDevice(runner, spec, scheduler.tp_cpu_group)
            except ValueError as e:
                refuse(f"{ENV}: {e}")
        leave_out_attention(runner.attn_backend)
        return result

    def events(result: Any, scheduler: Any) -> Any:
        scheduler.device_module = scheduler.laps_emulated.module(scheduler.device_module)
        return result

    def launched(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        # Without the overlap loop SGLang waits only in reading a result, and an emulated result is there at once.
        if result.copy_done is None:
            result.copy_done = scheduler.device_module.Event()
            result.copy_done.record()
        return result

    def state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result.internal_state.update(stand_in_status(scheduler))
        return result

    logger.warning(spec.warning())
    hook(WORKER, loaded, "AFTER", SEAMS)
    hook(OVERLAP, events, "AFTER", SEAMS)
    hook(RUN, launched, "AFTER", SEAMS)
    hook(STATE, state, "AFTER", SEAMS)


def leave_out_attention(attention: Any) -> None:
    """Make an attention backend compute nothing: on CPUs it computes a chunk over its whole prefix, far more than a
    step may take. The output of an emulated device means nothing; keys and values are written, kept and sent as
    usual."""
    # The host platform computes some kinds of attention itself, latent attention among them.
    attention.laps_left_out = lambda *_: False
    attention._run_sdpa_forward_extend = attention._run_sdpa_forward_decode = _no_attention


def _no_attention(query: Any, output: Any, *_: Any, **__: Any) -> Any:
    return output.zero_()
