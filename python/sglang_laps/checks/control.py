"""Control messages that SGLang takes although they end its scheduler: they get an answer here instead."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import torch
from fastapi import HTTPException
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqOutput,
    InitWeightsUpdateGroupReqOutput,
    ProfileReqOutput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromIPCReqOutput,
    UpdateWeightsFromTensorReqOutput,
)

from sglang_laps import seams

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_laps.core import LapsCore

_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_UPDATER = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_PROFILER = "managers.scheduler_components.profiler_manager.SchedulerProfilerManager"
UPDATES: dict[str, Callable[..., Any]] = {
    "begin_weight_update": BeginWeightUpdateReqOutput,
    "init_weights_update_group": InitWeightsUpdateGroupReqOutput,
    "update_weights_from_disk": UpdateWeightFromDiskReqOutput,
    "update_weights_from_ipc": UpdateWeightsFromIPCReqOutput,
    "update_weights_from_tensor": UpdateWeightsFromTensorReqOutput,
}
"""Methods that change weights, with their replies. SGLang lets errors in their messages end the scheduler: an unknown
format, for example, or a group without a name."""
MEET = ("begin_weight_update", "update_weights_from_ipc", "update_weights_from_tensor")
"""Methods at whose end all ranks wait for each other."""


def hook_scheduler() -> None:
    """Have the scheduler refuse what would end it."""
    for method, reply in UPDATES.items():
        seams.hook(f"{_UPDATER}.{method}", answered(reply, meet=method in MEET), "AROUND")
    seams.hook(f"{_UPDATER}.release_memory_occupation", release, "AROUND")
    seams.hook(f"{_UPDATER}.resume_memory_occupation", resume, "AROUND")
    seams.hook(f"{_PROFILER}._profile", profile, "AROUND")


def hook_manager() -> None:
    """Have this process tell clients what the scheduler has refused."""
    seams.hook(f"{_MANAGER}.release_memory_occupation", _told("release_memory_occupation"), "AROUND")
    seams.hook(f"{_MANAGER}.resume_memory_occupation", _told("resume_memory_occupation"), "AROUND")
    seams.hook(f"{_MANAGER}._execute_profile", execute_profile, "AROUND")
    seams.hook(f"{_MANAGER}._mark_state_dispatched", abort_again, "AROUND")


def release(original: Callable[[Any, Any], Any], updater: Any, message: Any) -> Any:
    """Wrap ``release_memory_occupation``: refuse it while the server is not idle. The reply has no field for an error,
    so its `rid`, which SGLang does not use, holds the reason."""
    paused = updater.scheduler is not None and updater.scheduler._engine_paused
    idle = torch.tensor(int(updater.is_fully_idle(ignore_waiting=paused)))
    # Data-parallel attention ranks have their own requests, but release memory together.
    torch.distributed.all_reduce(idle, torch.distributed.ReduceOp.MIN, group=updater.tp_cpu_group)
    if idle:
        return original(updater, message)
    return ReleaseMemoryOccupationReqOutput(rid="the server is not idle: wait for its requests, or abort them")


def resume(original: Callable[[Any, Any], Any], updater: Any, message: Any) -> Any:
    """Wrap ``resume_memory_occupation``: refuse it for memory that was not released."""
    if kept := sorted(set(message.tags or GPU_MEMORY_ALL_TYPES) - updater.offload_tags):
        return ResumeMemoryOccupationReqOutput(rid=f"not released: {', '.join(kept)}")
    return original(updater, message)


def answered(reply: Callable[..., Any], *, meet: bool) -> Callable[..., Any]:
    """Return a wrapper of a method with this reply, which answers with the error if SGLang cannot do this on a rank.
    `meet`: the ranks wait for each other at the end of the method, which a rank with an error does not reach."""

    def update(original: Callable[[Any, Any], Any], updater: Any, message: Any) -> Any:
        made = wrong = None
        try:
            made = original(updater, message)
        except Exception as e:
            wrong = f"{type(e).__name__}: {e}"
            if meet:
                torch.distributed.barrier(group=updater.tp_cpu_group)
        ranks: list[str | None] = [None] * torch.distributed.get_world_size(updater.tp_cpu_group)
        torch.distributed.all_gather_object(ranks, wrong, group=updater.tp_cpu_group)
        wrong = next(filter(None, ranks), None)
        return made if wrong is None else reply(success=False, message=wrong)

    return update


def profile(original: Callable[[Any, Any], Any], profiler: Any, message: Any) -> Any:
    """Wrap ``_profile``: answer with the error if SGLang cannot do this. What would fail in a later batch is looked at
    before: the number of steps, and the folder."""
    if message.profile_by_stage and not message.num_steps:
        return ProfileReqOutput(success=False, message="num_steps: missing, and needed for profile_by_stage")
    try:
        if message.output_dir is not None:
            os.makedirs(os.path.expanduser(message.output_dir), exist_ok=True)
        return original(profiler, message)
    except Exception as e:
        return ProfileReqOutput(success=False, message=f"{type(e).__name__}: {e}")


class Profiles:
    """Starts and stops of one scheduler's profiles, one at a time. A profile that stops frees its records. What a batch
    has entered before still writes to them when it ends, if a new profile runs by then: a new one waits for this."""

    def __init__(self, scheduler: Scheduler, core: LapsCore) -> None:
        manager: Any = scheduler.profiler_manager
        self._profiler, self._core, self._stopped = manager, core, False
        self._start, self._stop = manager._start_profile, manager._stop_profile
        self._step = manager._profile_batch_predicate
        manager._start_profile = self.start
        manager._stop_profile = self.stop
        manager._profile_batch_predicate = self.step

    def step(self, batch: Any) -> None:
        """Start or stop a profile, as this batch demands, which is about to run."""
        self._stopped &= bool(self._core.under_way)
        self._step(batch)

    def stop(self, stage: Any = None) -> Any:
        # The profiler of SGLANG_PROFILE_V2 stops by itself.
        self._stopped |= getattr(self._profiler, "profile_in_progress", False)
        return self._stop(stage)

    def start(self, stage: Any = None) -> Any:
        """Start a profile, or try again with the next batch (`stage`: of batches of one stage), or refuse it."""
        profiler, between_batches = self._profiler, stage is None and not self._core.under_way
        if not getattr(profiler, "profile_in_progress", False) and (between_batches or not self._stopped):
            return self._start(stage)
        if stage is not None:
            # SGLang starts the profile with the batch that has the number 0.
            name = "profiler_prefill_ct" if stage.is_prefill() else "profiler_decode_ct"
            setattr(profiler, name, getattr(profiler, name) - 1)
        return ProfileReqOutput(success=False, message="a profile is in progress, or has ended in the batch that runs")


def _told(name: str) -> Callable[..., Awaitable[None]]:
    async def ask(_: Any, manager: Any, message: Any, request: Any = None) -> None:
        """Replace a method that drops the schedulers' replies: raise ValueError (answered 400) if one has refused."""
        manager.auto_create_handle_loop()
        replies = await getattr(manager, f"{name}_communicator")(message)
        if refused := next((reply.rid for reply in replies if reply.rid), None):
            raise ValueError(refused)

    return ask


async def execute_profile(original: Callable[[Any, Any], Awaitable[Any]], manager: Any, message: Any) -> Any:
    """Wrap ``_execute_profile``: answer 400 with the reason, not 500 without, if the scheduler has refused."""
    try:
        return await original(manager, message)
    except RuntimeError as e:
        raise HTTPException(400, str(e)) from None


def abort_again(original: Callable[[Any, str], None], manager: Any, rid: str) -> None:
    """Wrap ``_mark_state_dispatched``: repeat an abort that came before its request went to the scheduler.

    That is while the text was tokenized, or while the request waited for new weights. The scheduler has ignored the
    abort, and SGLang sends no second one, even when the client disconnects: the request would run, or wait for minutes
    for its other half.
    """
    original(manager, rid)
    state = manager.rid_to_state.get(rid)
    if state is not None and state.abort_sent:
        state.abort_sent = False
        manager.abort_request(rid)
