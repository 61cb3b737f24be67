from __future__ import annotations

import argparse
import json
import os
from dataclasses import fields

import pytest
from laps_core.config import ConfigError, LapsConfig
from laps_core.length import LONG, SHORT
from sglang_laps import options


def parse_config(*argv: str) -> LapsConfig:
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    return options.from_args(parser.parse_args(argv))


def test_config_has_expected_defaults() -> None:
    config = parse_config("--enable-laps-scheduler")
    assert (config.length_threshold, config.length_basis) == (256, "uncached")
    assert (config.order, config.guard, config.preempt_overhead, config.slice_ms) == ("least-work", 0.15, 0.25, 4.0)


def test_flags_and_json_set_knobs() -> None:
    config = parse_config("--laps-length-threshold", "auto", "--laps-config", '{"guard": 0.5}')
    assert (config.length_threshold, config.guard) == ("auto", 0.5)


def test_deadline_is_set_for_all_requests_or_per_class() -> None:
    for argv, both in (
        (("--laps-ttft-slo-ms", "400"), (0.4, 0.4)),
        (("--laps-ttft-slo-ms", "400,4000"), (0.4, 4.0)),
        (("--laps-config", '{"ttft_slo_ms": [400, 4000]}'), (0.4, 4.0)),
        ((), (None, None)),
    ):
        config = parse_config(*argv)
        assert (config.deadline_s(SHORT), config.deadline_s(LONG)) == both
        assert LapsConfig.parse({}, json.dumps(config.as_dict())) == config, "as scheduler processes read it"


def test_limit_values_are_accepted() -> None:
    config = parse_config("--laps-length-threshold", "1", "--laps-config", '{"guard": 0, "slice_ms": 1000}')
    assert (config.length_threshold, config.guard, config.slice_ms) == (1, 0, 1000)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--laps-length-threshold", "0"], "--laps-length-threshold: 0 is not"),
        (["--laps-length-threshold", "-3"], "--laps-length-threshold: -3 is not"),
        (
            ["--laps-length-threshold", "many"],
            "--laps-length-threshold: many is not valid: must be a whole number of tokens >= 1, or auto",
        ),
        (["--laps-length-basis", "words"], "--laps-length-basis: words is not one of uncached, prompt"),
        (["--laps-config", "{"], "--laps-config: not JSON"),
        (["--laps-config", "[]"], "--laps-config: not a JSON object"),
        (["--laps-config", '{"gard": 0.5}'], "--laps-config: unknown key 'gard'"),
        (["--laps-config", '{"guard": 1.5}'], "--laps-config: guard: 1.5 is not from 0 to 1"),
        (["--laps-config", '{"preempt_overhead": 0}'], "--laps-config: preempt_overhead: 0 is not from 0.01 to 1"),
        (["--laps-config", '{"preempt_overhead": 1.1}'], "--laps-config: preempt_overhead: 1.1 is not from 0.01 to 1"),
        (
            ["--laps-config", '{"slice_ms": -1}'],
            "--laps-config: slice_ms: -1 is not a number of milliseconds from 0 to",
        ),
        (
            ["--laps-config", '{"order": "spf"}'],
            '--laps-config: order: "spf" is not one of least-work, fcfs, lars,',
        ),
        (["--laps-config", '{"graph_lengths": []}'], "--batch-prefill-seq-lengths: [] is not a list of whole numbers"),
        (["--laps-config", '{"graph_lengths": [8, 0]}'], "--batch-prefill-seq-lengths: [8, 0] is not a list"),
        (["--laps-config", '{"graph_lengths": 8}'], "--batch-prefill-seq-lengths: 8 is not a list"),
        (["--laps-config", '{"long_share": 0.5}'], "--laps-config: unknown key 'long_share'"),
        (["--laps-config", '{"guard": true}'], "--laps-config: guard: true is not"),
        (["--laps-config", '{"guard": ' + "[" * 100_000], "--laps-config: not JSON: maximum recursion depth"),
        (["--laps-config", '{"guard": NaN}'], "--laps-config: guard: NaN is not"),
        (
            ["--laps-ttft-slo-ms", "5e-324"],
            "--laps-ttft-slo-ms: 5e-324 is not valid: must be a number of milliseconds from 0.1",
        ),
        (["--laps-ttft-slo-ms", "1e10"], "--laps-ttft-slo-ms: 1e10 is not valid: must be a number"),
        (
            ["--laps-ttft-slo-ms", "400,4000,9"],
            "--laps-ttft-slo-ms: 400 4000 9 is not valid: must be a number of milliseconds",
        ),
        (["--laps-ttft-slo-ms", "400,"], "--laps-ttft-slo-ms: 400,"),
        (
            ["--laps-ttft-slo-ms", "400,1e10"],
            "--laps-ttft-slo-ms: 400 1e10 is not valid: must be a number of milliseconds",
        ),
        (
            ["--laps-config", '{"ttft_slo_ms": [400]}'],
            "--laps-ttft-slo-ms: [400] is not valid: must be a number of milliseconds",
        ),
        (["--laps-config", '{"ttft_slo_ms": 1%s}' % (400 * "0")], "--laps-ttft-slo-ms: 1000"),
        (["--laps-config", '{"slice_ms": 1%s}' % (400 * "0")], "--laps-config: slice_ms: 1000"),
        (
            ["--laps-config", '{"slice_ms": Infinity}'],
            "--laps-config: slice_ms: Infinity is not a number of milliseconds",
        ),
        (["--laps-config", '{"wait_window_ms": Infinity}'], "--laps-wait-window-ms: Infinity is not a number of"),
        (["--laps-wait-window-ms", "nan"], "--laps-wait-window-ms: nan is not a number of milliseconds >= 0"),
        (["--laps-wait-window-ms", "inf"], "--laps-wait-window-ms: inf is not a number of milliseconds >= 0"),
        (["--laps-config", '{"guard": "0.5"}'], '--laps-config: guard: "0.5" is not from 0 to 1'),
        (["--laps-config", '{"graphs": 1}'], "--enable-batch-prefill-cuda-graph: 1 is not true or false"),
        (
            ["--laps-config", '{"wait_max_batch": true}'],
            "--laps-wait-max-batch: true is not a whole number of requests",
        ),
        (["--laps-config", '{"graph_lengths": [8, true]}'], "--batch-prefill-seq-lengths: [8, true] is not a list of"),
        (
            ["--laps-config", '{"graph_lengths": {}}'],
            "--batch-prefill-seq-lengths: [] is not a list of whole numbers of",
        ),
        (["--batch-prefill-seq-lengths", "8,0", "16"], "--batch-prefill-seq-lengths: 8 0 16 is not a list of whole"),
        (["--batch-prefill-batch-sizes", "1.5"], "--batch-prefill-batch-sizes: 1.5 is not a list of whole numbers of"),
        (["--laps-length-basis", "a\nb"], "--laps-length-basis: a\\nb is not one of"),
        (["--laps-length-basis", ""], '--laps-length-basis: "" is not one of'),
        (["--laps-config", '{"profile": "a\\u0000b"}'], "--laps-config: profile: "),
        (
            ["--laps-config", '{"profile": ""}'],
            '--laps-config: profile: "" is not valid: must be true or false, or a path',
        ),
        (
            ["--laps-config", '{"profile": 1}'],
            "--laps-config: profile: 1 is not valid: must be true or false, or a path",
        ),
        (["--laps-config", '{"token_max": 9}'], "--laps-config: unknown key 'token_max'; known: "),
        (["--laps-config", '{"guard": 0.5, "guard": 0.1}'], "--laps-config: guard is given twice"),
        (
            ["--laps-length-threshold", "9", "--laps-config", '{"length_threshold": 8}'],
            "--laps-config: length_threshold is also set by --laps-length-threshold",
        ),
    ],
)
def test_bad_value_error_is_one_line_naming_flag(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse_config(*argv)
    assert str(e.value).startswith(says)
    assert "\n" not in str(e.value)


def test_flag_and_json_values_have_knob_types() -> None:
    text = '{"slice_ms": 0, "graph_batches": [1, 2]}'
    config = parse_config(
        "--laps-wait-window-ms", "7", "--batch-prefill-seq-lengths", "8,16", "32", "--laps-config", text
    )
    assert (config.wait_window_ms, config.slice_ms) == (7.0, 0.0)
    assert (config.graph_lengths, config.graph_batches) == ((8, 16, 32), (1, 2))
    with pytest.raises(ConfigError, match="guard: 2 is not from 0 to 1"):
        LapsConfig(guard=2)


def test_config_round_trips_through_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.ENV, "")
    config = LapsConfig(length_threshold=99, guard=0.1)
    options.to_env(config)
    assert options.from_env(os.environ) == config
    assert options.from_env({}) is None
    assert options.from_env({options.ENV: "0"}) is None
    assert options.from_env({options.ENV: "1"}) == LapsConfig()
    with pytest.raises(ConfigError, match=f"{options.ENV}: "):
        options.from_env({options.ENV: "nonsense"})


def test_graph_lengths_above_maximum_are_dropped() -> None:
    assert parse_config("--batch-prefill-max-seq-len", "100").graph_lengths == (8, 16, 32, 64)
    with pytest.raises(ConfigError, match="--batch-prefill-max-seq-len: 7 leaves no length of 8, 16"):
        parse_config("--batch-prefill-max-seq-len", "7")
    with pytest.raises(ConfigError, match="--batch-prefill-max-seq-len: many leaves no length"):
        parse_config("--batch-prefill-max-seq-len", "many")


def test_server_config_has_seventeen_knobs_and_preset() -> None:
    assert len(fields(LapsConfig)) == 17 + 1
