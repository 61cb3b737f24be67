"""Profiles that start and stop while batches run and pause, and long pauses of generation, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import PauseGenerationReqInput, ProfileReqOutput
from sglang.srt.managers.scheduler_components import invariant_checker
from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager
from sglang.srt.model_executor.forward_batch_info import ForwardMode

PREFILL, DECODE = (SimpleNamespace(forward_mode=mode) for mode in (ForwardMode.EXTEND, ForwardMode.DECODE))


class Profiler(SchedulerProfilerManager):
    """SGLang's profiler of stages, which lists what it would do."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.profile_by_stage, self.profile_in_progress = True, False
        self.profiler_prefill_ct = self.profiler_decode_ct = 0
        self.profiler_target_prefill_ct = self.profiler_target_decode_ct = 1

    def _start_profile(self, stage: Any = None) -> ProfileReqOutput:
        self.done.append(f"start {stage and stage.name}")
        self.profile_in_progress = True
        return ProfileReqOutput(success=True, message="")

    def _stop_profile(self, stage: Any = None) -> ProfileReqOutput:
        self.done.append(f"stop {stage and stage.name}")
        self.profile_in_progress = False
        return ProfileReqOutput(success=True, message="")


@pytest.mark.parametrize("pauses", [True, False])
def test_no_profile_starts_in_a_batch_in_which_one_has_ended(pauses: bool) -> None:
    """torch would write to freed memory when the batch ends, and SGLang's server ends."""
    from sglang_laps.checks.control import Profiles

    profiler, core = Profiler(), SimpleNamespace(under_way=[])
    profiles = Profiles(SimpleNamespace(profiler_manager=profiler), core)  # type: ignore[arg-type]
    profiler._profile_batch_predicate(PREFILL)
    core.under_way = [PREFILL] if pauses else []
    profiler._profile_batch_predicate(DECODE)
    assert profiler.done == ["start EXTEND", "stop EXTEND"]
    assert profiles.start().success != pauses, "an order between two batches is not refused"
    if not pauses:
        return
    profiler._profile_batch_predicate(DECODE)
    assert profiler.done == ["start EXTEND", "stop EXTEND"]
    core.under_way = []
    for batch in (DECODE, DECODE, DECODE):
        profiler._profile_batch_predicate(batch)
    assert profiler.done[2:] == ["start DECODE", "stop DECODE"]


def test_one_profile_runs_at_a_time() -> None:
    """SGLang would start the profile of prefill batches while decode steps are profiled, which ends its server, too."""
    from sglang_laps.checks.control import Profiles

    profiler = Profiler()
    profiles = Profiles(SimpleNamespace(profiler_manager=profiler), SimpleNamespace(under_way=[]))  # type: ignore[arg-type]
    for batch in (DECODE, PREFILL, DECODE, PREFILL):
        profiler._profile_batch_predicate(batch)
    assert not profiles.start().success
    assert profiler.done == ["start DECODE", "stop DECODE", "start EXTEND"]


def test_watchdog_does_not_end_a_server_whose_generation_is_paused(mixin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's watchdog looks for batches that take too long, and found the last batch before the pause."""
    monkeypatch.setattr(invariant_checker, "WatchdogRaw", lambda **given: SimpleNamespace(**given))
    stock = type("Stock", (), {"pause_generation": lambda self, message: None})
    me: Any = type("Paused", (mixin, stock), {"__init__": lambda _: None})()
    me.laps, me.is_initializing, me.cur_batch_for_debug = SimpleNamespace(colocated=None), False, DECODE
    watchdog: Any = invariant_checker.create_scheduler_watchdog(me, 300.0)
    assert watchdog.is_active()
    me.pause_generation(PauseGenerationReqInput(mode="in_place"))
    assert not watchdog.is_active()
