"""Invalid arguments of the benchmark end with one line before anything starts."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from benchmark.rig import devices, variants
from benchmark.serve import command as serve

CPU = ["--device", "cpu"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--workload", "nope"], "no workload 'nope'"),
        (["--variants", "fcfs,nope"], "no variant 'nope'"),
        (["--variants", "fcfs,fcfs"], "given twice"),
        (["--variants", "laps-graphs"], "needs --device cuda"),
        (["--variant", "fcfs=--x"], "built-in"),
        (["--variant", "mine"], "is not NAME='ARGS'"),
        (["--variant", "mine='"], "No closing quotation"),
        (["--rounds", "0"], "--rounds: 0 is not positive"),
        (["--utilisation", "-1"], "--utilisation: -1 is not positive"),
        (["--longest", "100"], "at least 512"),
        (["--concurrency", "0"], "--concurrency: 0 is not positive"),
    ],
)
def test_invalid_argument_prints_one_line_error(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        serve.COMMAND.main([*CPU, *argv])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


def test_custom_variants_are_last_and_keep_arguments() -> None:
    own = variants.given("half=--enable-laps-scheduler --laps-config '{\"guard\": 0.5}'")
    assert own.args == ("--enable-laps-scheduler", "--laps-config", '{"guard": 0.5}')
    found = variants.chosen(["fcfs", "laps"], [own], cuda=False)
    assert [v.name for v in found] == ["fcfs", "laps", "half"]
    assert [v.stock for v in found] == [True, False, False]


def test_variant_accepts_environment_variables() -> None:
    old = variants.given("old=PYTHONPATH=../old/python --enable-laps-scheduler --laps-config {}")
    assert (old.args, old.env) == (("--enable-laps-scheduler", "--laps-config", "{}"), {"PYTHONPATH": "../old/python"})


def test_variant_knobs_are_merged_with_device_knobs() -> None:
    device = dataclasses.replace(devices.DEVICES[devices.CPU], args=(), laps={"slice_ms": 40})
    flag, knobs, *own = device.args_of(variants.BUILT_IN[variants.PAPER])
    assert (flag, json.loads(knobs), own) == ("--laps-config", {"slice_ms": 40, "preset": "paper"}, [variants.ON])
    assert device.args_of(variants.BUILT_IN[variants.FCFS]) == ("--schedule-policy", "fcfs")


def test_with_prefixes_preserves_pythonpath_of_variant() -> None:
    old, cpu = variants.given("old=PYTHONPATH=old/python --x"), devices.DEVICES[devices.CPU]
    assert cpu.with_prefixes().env_of(old)["PYTHONPATH"] == os.pathsep.join((str(devices.PREFIXES), "old/python"))
    assert "PYTHONPATH" not in cpu.env_of(variants.BUILT_IN["laps"])


def test_base_is_fcfs_if_present() -> None:
    assert serve.base_of(["laps", "fcfs"]) == "fcfs"
    assert serve.base_of(["laps", "hrrn"]) == "laps"
