"""Emulated devices: settings, timeline, slices, and recorded figures. No SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laps_core.config import ConfigError
from laps_core.latency.step import Coefficients
from laps_emulate import ENV, spec
from laps_emulate.device import EmulatedDevice
from laps_emulate.events import Event
from laps_emulate.record import Record
from laps_emulate.spec import DeviceSpec
from laps_emulate.timeline import SPIN_S, Timeline
from laps_plan.decode import DecodeCost
from laps_plan.profile import Profile, names

PROFILE = names()[0]
TICK_S = 1e-5


class Clock:
    """Clock that advances a little when it is read, and during sleeps, which take `late_s` too long."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.at = 100.0
        self.late_s = late_s
        self.slept: list[float] = []

    def __call__(self) -> float:
        self.at += TICK_S
        return self.at

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds + self.late_s


class Server:
    """Tiny model that takes `model_s`, on a device whose layers take 1 ms per token each; records events with times."""

    def __init__(self, layers: int = 10, slow: float = 1.0, model_s: float = 0.0, **launch: Any) -> None:
        self.clock = Clock()
        self.model_s = model_s
        self.events: list[tuple[str, float]] = []
        self.forward: Any = self._model
        costs = Coefficients(0.0, layers * 1e-3, 0.0, 0.0, 0.0)
        decode = DecodeCost(streams=(1, 2), seconds=(5e-3, 6e-3), context=1e-5)
        profile = Profile(name="p", source="made up", coefficients=costs, layers=layers, decode=decode, **launch)
        self.began = self.clock.at
        self.device = EmulatedDevice(self, DeviceSpec("p", profile, slow), Timeline(self.clock, self.clock.sleep))

    def _model(self, batch: Any, **_: Any) -> str:
        self.note("model")
        self.clock.at += self.model_s
        return f"out of {batch.forward_mode.name}"

    def note(self, what: str) -> None:
        self.events.append((what, round(1e3 * (self.clock.at - self.began), 0)))

    def run(self, *pairs: tuple[int, int], mode: str = "EXTEND") -> str:
        new, old = [n for n, _ in pairs], [o for _, o in pairs]
        name = SimpleNamespace(name=mode)
        return str(
            self.forward(SimpleNamespace(forward_mode=name, extend_seq_lens_cpu=new, extend_prefix_lens_cpu=old))
        )

    def step(self, *contexts: int) -> str:
        """Run a decode step of streams with these context lengths (tokens)."""
        name, lengths = SimpleNamespace(name="DECODE"), torch.tensor(contexts)
        return str(self.forward(SimpleNamespace(forward_mode=name, batch_size=len(contexts), seq_lens_cpu=lengths)))

    def event(self) -> Event:
        """Return an event recorded after all work launched so far."""
        event: Event = self.device.module(torch.cpu).Event(enable_timing=True)
        event.record()
        return event

    def ms(self) -> float:
        """Return the time when all launched work will have ended (milliseconds)."""
        return 1e3 * (self.event().at_s - self.began)


# -- settings


@pytest.mark.parametrize(("more", "slow"), [("", 1.0), (",slow=1", 1.0), (",slow=2.5", 2.5), (" ", 1.0)])
def test_spec_parses_profile_and_slowdown(more: str, slow: float) -> None:
    found = DeviceSpec.parse(PROFILE + more)
    assert (found.profile.name, found.slow) == (PROFILE, slow)
    assert DeviceSpec.parse(found.text) == found, "the processes started from here read the same"


@pytest.mark.parametrize(
    "more", [",", ",slow=", ",slow=x", ",slow=0.5", ",slow=nan", ",slow=inf", ",slow=-3", ",2", ",slow=2,slow=2"]
)
def test_malformed_spec_is_rejected(more: str) -> None:
    with pytest.raises(ConfigError, match=r"^--laps-emulate: .* is not PROFILE\[,slow=K\]") as e:
        DeviceSpec.parse(PROFILE + more)
    assert "\n" not in str(e.value)


def test_unknown_profile_error_lists_profile_names() -> None:
    with pytest.raises(ConfigError, match=r"^--laps-emulate: .*known: ") as e:
        DeviceSpec.parse("h9000")
    assert "\n" not in str(e.value)
    assert all(name in str(e.value) for name in names())


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind": "laps-sim-profile"}', "1"])
def test_invalid_profile_file_is_rejected(tmp_path: Any, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^--laps-emulate: "):
        DeviceSpec.parse(str(path))


def test_spec_is_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec.from_env({}) is None
    assert spec.from_env({spec.ENV: " "}) is None
    with pytest.raises(ConfigError, match=f"^{spec.ENV}: "):
        spec.from_env({spec.ENV: "h9000"})
    monkeypatch.setenv(spec.ENV, "")
    spec.to_env(DeviceSpec.parse(f"{PROFILE},slow=3"))
    found = spec.from_env()
    assert found is not None
    assert found.slow == 3.0


def test_warning_states_that_device_is_emulated() -> None:
    said = DeviceSpec.parse(f"{PROFILE},slow=3").warning()
    assert said.startswith("EMULATED DEVICE: ")
    assert all(x in said for x in (PROFILE, Profile.load(PROFILE).source, "stretched 3 times", "nothing here measures"))


# -- import of the plugin

WITH_GPU = """
import sys
import types
import torch
torch.cuda.is_available = lambda: True
sys.modules["sglang.srt.platforms"] = types.SimpleNamespace(current_platform="the GPU's")
from laps_emulate import entry
print(entry.activate())
entry.load()
print(sorted(name for name in sys.modules if name.startswith("laps_emulate")))
"""


def with_gpu(device: str) -> subprocess.CompletedProcess[str]:
    """Run SGLang's entry points in a process as on a machine with a GPU."""
    env = {**os.environ, ENV: device}
    return subprocess.run([sys.executable, "-c", WITH_GPU], env=env, capture_output=True, text=True, check=False)


def test_plugin_imports_only_entry_points_with_gpu() -> None:
    done = with_gpu("")
    assert done.stdout.splitlines() == ["None", "['laps_emulate', 'laps_emulate.entry']"], done.stderr


def test_emulation_is_rejected_with_gpu() -> None:
    done = with_gpu(PROFILE)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("sglang-laps: error: SGLANG_LAPS_EMULATE: devices are emulated on machines without")


# -- the timeline


def test_timeline_schedules_work_back_to_back() -> None:
    clock = Clock()
    time = Timeline(clock, clock.sleep)
    begin = time.begin()
    assert time.book(begin, 0.5) == pytest.approx(100.5, abs=1e-3)
    assert time.begin() == time.free
    assert time.book(100.1, 0.25) == pytest.approx(100.75, abs=1e-3), "launched while the device was busy"
    time.wait(time.free)
    assert clock.at == pytest.approx(100.75, abs=2 * TICK_S)
    clock.at = 200.0
    assert time.begin() == pytest.approx(200.0, abs=1e-3)


@pytest.mark.parametrize("late_s", [0.0, 0.8 * SPIN_S, 5e-3])
def test_wait_sleeps_first_then_polls_clock(late_s: float) -> None:
    clock = Clock(late_s)
    Timeline(clock, clock.sleep).wait(100.1)
    assert clock.slept == [pytest.approx(0.1 - SPIN_S, abs=2 * TICK_S)]
    assert clock.at == pytest.approx(max(100.1, 100.1 - SPIN_S + late_s), abs=3 * TICK_S)


def test_wait_until_past_or_near_time_does_not_sleep() -> None:
    clock = Clock()
    time = Timeline(clock, clock.sleep)
    for until in (50.0, 100.0, 100.0001):
        time.wait(until)
    assert not clock.slept


# -- whole batches


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
@pytest.mark.parametrize("slow", [1.0, 3.0])
@pytest.mark.parametrize("model_s", [0.0, 0.03])
def test_prefill_takes_profile_time(mode: str, slow: float, model_s: float) -> None:
    server = Server(slow=slow, model_s=model_s)
    assert server.run((3, 500), (2, 0), mode=mode) == f"out of {mode}"
    assert server.ms() == pytest.approx(50.0 * slow, abs=0.1)


@pytest.mark.parametrize("mode", ["IDLE", "PREBUILT"])
def test_other_forward_modes_are_not_emulated(mode: str) -> None:
    server = Server()
    assert server.run((3, 0), mode=mode) == f"out of {mode}"
    assert server.ms() < 0.1
    assert server.device.status()["steps"] == 0


def test_pipeline_stage_takes_its_share_of_step_time() -> None:
    server, costs = Server(), Coefficients(0.0, 4e-3, 0.0, 0.0, 0.0)
    asked_for = DeviceSpec("p", Profile(name="p", source="made up", coefficients=costs, layers=4), 3.0)
    server.forward = server._model
    EmulatedDevice(server, asked_for, Timeline(server.clock, server.clock.sleep), share=0.5, waits=True)
    server.run((20, 0))
    assert server.clock.at - server.began == pytest.approx(0.12, abs=1e-3), "the next stage has its output no sooner"


def test_overrun_of_slow_tiny_model_is_counted() -> None:
    server = Server(model_s=0.08)
    server.run((5, 0))
    server.run((20, 0))
    assert server.ms() == pytest.approx(80.0 + 200.0, abs=0.1)
    assert server.clock.at - server.began == pytest.approx(0.16, abs=1e-3), "the host runs ahead"
    told = server.device.status()
    assert (told["steps"], told["overrun"]) == (2, 1)
    assert told["lasted_over_profile"] == {"median": pytest.approx(1.3, abs=0.01), "p99": pytest.approx(1.6, abs=0.01)}
    assert told["host_share"] == pytest.approx((1.0 + 0.4) / 2, abs=0.01)


def test_status_without_steps_names_profile_and_slowdown() -> None:
    told = Server(slow=2.0).device.status()
    assert told == {
        "profile": "p",
        "source": "made up",
        "slow": 2.0,
        "steps": 0,
        "lasted_over_profile": {"median": None, "p99": None},
        "overrun": 0,
        "host_share": None,
    }
    assert Server(slow=2.0).device.labels == {"profile": "p", "slow": "2"}


def test_record_quantiles_cover_only_newest_steps() -> None:
    record = Record()
    for i in range(10_000):
        record.add(1.0, 9.0 if i < 5_000 else 1.0, 0.5)
    told = record.as_dict()
    assert (told["steps"], told["lasted_over_profile"]) == (10_000, {"median": 1.0, "p99": 1.0})


# -- running ahead


def test_launch_returns_at_once_and_event_waits_for_step() -> None:
    server = Server()
    server.run((5, 0))
    first = server.event()
    server.run((2, 0))
    second = server.event()
    assert server.clock.at - server.began < 1e-3
    assert not first.query()
    first.synchronize()
    assert server.clock.at - server.began == pytest.approx(0.05, abs=1e-4)
    assert first.query()
    assert not second.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(second)
    second.synchronize()
    assert first.elapsed_time(second) == pytest.approx(20.0, abs=0.01)
    assert server.clock.at - server.began == pytest.approx(0.07, abs=1e-4)


def test_idle_and_unrecorded_events_are_complete() -> None:
    server = Server()
    event = server.event()
    assert event.at_s == pytest.approx(server.began, abs=1e-3)
    module = server.device.module(torch.cpu)
    assert event.query()
    assert module.Event().query()
    assert module.Stream is torch.cpu.Stream, "everything else is that of the device it runs on"
    server.run((5, 0))
    module.synchronize()
    assert server.clock.at - server.began == pytest.approx(0.05, abs=1e-4)


def test_queued_step_starts_when_previous_step_ends() -> None:
    server = Server(launch_s=0.02)
    server.run((5, 0))
    assert server.clock.at - server.began == pytest.approx(0.02, abs=1e-4), "a launch holds the host up"
    server.run((1, 0))
    assert server.clock.at - server.began == pytest.approx(0.04, abs=1e-4)
    assert server.ms() == pytest.approx(50.0 + 10.0, abs=0.1)
    server.clock.at += 0.1
    server.run((1, 0))
    assert server.ms() == pytest.approx(140.0 + 20.0, abs=0.2), "and no step ends before its launch"


def test_slices_are_launched_layer_by_layer() -> None:
    server, seen = Server(layers=10, slices_launch_s=0.05), list[float]()
    assert server.device.launch_s == 0.05

    def pause(left: float) -> bool:
        seen.append(round(1e3 * (server.clock.at - server.began)))
        return False

    with server.device.cut(2, pause):
        server.run((10, 0))
    # A slice takes 20 ms, its launch 10 ms: the first pause starts before the first slice has ended.
    assert seen == [10, 20, 40, 60]
    assert server.clock.at - server.began == pytest.approx(0.07, abs=1e-3), (
        "the last slice and half of another are left"
    )
    assert server.ms() == pytest.approx(100.0, abs=0.1)
    slow = Server(layers=10, slices_launch_s=0.2)
    with slow.device.cut(2, lambda left: False):
        slow.run((10, 0))
    assert slow.ms() == pytest.approx(200.0, abs=0.2), "the device waits for the host"


# -- decoding


def test_decode_step_time_depends_on_streams_and_contexts() -> None:
    server = Server(slow=2.0, launch_s=0.05)
    assert server.step(100, 300) == "out of DECODE"
    assert server.ms() == pytest.approx(2 * (6.0 + 4.0), abs=0.1), "and no time to launch"
    server.step(100)
    assert server.ms() == pytest.approx(20.0 + 2 * (5.0 + 1.0), abs=0.1)
    status = server.device.status()
    assert status["steps"] == 0
    assert status["decode"]["steps"] == 2
    assert status["decode"]["lasted_over_profile"]["median"] == pytest.approx(1.0, abs=0.01)


def test_decode_rows_in_mixed_chunk_read_their_contexts() -> None:
    server = Server()
    server.run((5, 100), (1, 199), (1, 299), mode="MIXED")
    assert server.ms() == pytest.approx(10.0 * 7 + 5.0, abs=0.1)


def test_decode_step_in_pause_starts_after_slice() -> None:
    server = Server(layers=10)

    def pause(left: float) -> bool:
        if left == 4:
            server.step(100)
        return left == 4

    with server.device.cut(3, pause):
        server.run((10, 0))
    assert server.ms() == pytest.approx(100.0 + 6.0, abs=0.1)


@pytest.mark.parametrize(
    ("mode", "profile", "refused"),
    [
        ("prefill", "cpu", None),
        ("null", "h200-qwen3-8b", None),
        (None, "h200-qwen3-8b", None),
        ("null", "cpu", "no decode steps"),
        ("null", "h200-deepseek-v3-dp8", "no decode steps"),
        ("decode", "h200-qwen3-8b", "not prefill"),
    ],
)
def test_emulation_depends_on_server_mode_and_profile(mode: str | None, profile: str, refused: str | None) -> None:
    reason = DeviceSpec.parse(profile).why_not(SimpleNamespace(disaggregation_mode=mode))
    assert (reason is None) == (refused is None)
    assert refused is None or refused in str(reason)


def test_decode_emulation_rejects_speculative_decoding() -> None:
    args = SimpleNamespace(disaggregation_mode="null", speculative_algorithm="EAGLE")
    assert "no profile has steps with drafts" in str(DeviceSpec.parse("h200-qwen3-8b").why_not(args))
    args.disaggregation_mode = "prefill"
    assert DeviceSpec.parse("h200-qwen3-8b").why_not(args) is None


# -- slices


@pytest.fixture
def server() -> Iterator[Server]:
    """Return a server whose tiny model takes 3 ms."""
    server = Server(layers=10, model_s=0.003)
    yield server
    assert server.device.status()["lasted_over_profile"]["p99"] == pytest.approx(1.0, abs=0.01)


def test_host_runs_one_slice_ahead(server: Server) -> None:
    def pause(left: float) -> bool:
        server.note(f"{left:g} left")
        return False

    with server.device.cut(3, pause):
        server.run((10, 0))
    # A layer takes 10 ms. The first pause comes after the tiny model has run, during the first slice.
    assert server.events == [("model", 0), ("7 left", 3), ("4 left", 30), ("1 left", 60)]
    assert server.ms() == pytest.approx(100.0, abs=0.1)


def test_batch_in_pause_starts_after_slice(server: Server) -> None:
    def pause(left: float) -> bool:
        if left == 4:
            server.run((1, 0))
            server.event().synchronize()
            server.note("short")
        return left == 4

    with server.device.cut(3, pause):
        server.run((10, 0))
    # The pause is at 30 ms; the second slice ends at 60, then the short batch takes 10 ms.
    assert server.events == [("model", 0), ("model", 30), ("short", 70)]
    assert server.ms() == pytest.approx(110.0, abs=0.1)
    assert server.device.status()["steps"] == 2


def test_batch_in_pause_can_run_in_slices(server: Server) -> None:
    def inner(left: float) -> bool:
        if left == 5:
            server.run((1, 0))
        return left == 5

    def outer(left: float) -> bool:
        if left == 2:
            with server.device.cut(5, inner):
                server.run((4, 0))
            server.event().synchronize()
            server.note("smaller")
        return left == 2

    with server.device.cut(8, outer):
        server.run((10, 0))
    assert server.events == [("model", 0), ("model", 3), ("model", 6), ("smaller", 130)]
    assert server.ms() == pytest.approx(150.0, abs=0.1)
    assert server.device.status()["steps"] == 3


def test_slices_ending_during_tiny_model_run_have_no_pause() -> None:
    server, seen = Server(layers=10, model_s=0.034), list[float]()

    def pause(left: float) -> bool:
        seen.append(left)
        return False

    with server.device.cut(1, pause):
        server.run((10, 0))
    assert seen == [6, 5, 4, 3, 2, 1]
    assert server.ms() == pytest.approx(100.0, abs=0.1), "and the batch takes no longer for it"


def test_long_pause_delays_device() -> None:
    server = Server(layers=2)

    def pause(left: float) -> bool:
        server.clock.at += 0.025
        return False

    with server.device.cut(1, pause):
        server.run((10, 0))
    assert server.ms() == pytest.approx(25.0 + 10.0, abs=0.2)


def test_failed_pause_does_not_affect_next_batch() -> None:
    server = Server()

    def pause(left: float) -> bool:
        raise RuntimeError("x")

    with pytest.raises(RuntimeError), server.device.cut(1, pause):
        server.run((10, 0))
    with server.device.cut(1, pause):
        pass
    server.run((1, 0))
