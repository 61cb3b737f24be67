"""Contract between server and router: each reads the other's messages, and invalid messages are refused."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.length import CLASSES, classify
from laps_core.protocol import IDLE, ByClass, Load, Status, read_status

numbers = st.floats(0, 1e300)
loads = st.builds(Load, backlog_tokens=numbers, slo_deviation=numbers, busy_share=numbers)


@given(st.booleans(), st.text(), st.none() | loads)
def test_status_round_trips(enabled: bool, version: str, load: Load | None) -> None:
    status = Status(enabled=enabled, version=version, load=load)
    wire = json.dumps({**status.as_dict(), "queues": {"short": 1}}).encode()
    assert read_status(wire) == read_status(status.as_dict()) == status


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff",
        b"[1]",
        b'{"other": ' + b"[" * 100_000,
        b'{"load": null}',
        b'{"enabled": true, "load": {}}',
        b'{"enabled": true, "load": {"backlog_tokens": 1, "slo_deviation": 0}}',
        b'{"enabled": true, "load": {"backlog_tokens": true, "slo_deviation": 0, "busy_share": 0}}',
        b'{"enabled": true, "load": {"backlog_tokens": "1", "slo_deviation": 0, "busy_share": 0}}',
        b'{"enabled": true, "load": {"backlog_tokens": NaN, "slo_deviation": 0, "busy_share": 0}}',
        b'{"enabled": true, "load": {"backlog_tokens": 1e999, "slo_deviation": 0, "busy_share": 0}}',
        b'{"enabled": true, "load": {"backlog_tokens": 1%s, "slo_deviation": 0, "busy_share": 0}}' % (b"0" * 400),
    ],
)
def test_invalid_status_is_rejected(said: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_status(said)


def test_server_load_combines_loads_of_dp_ranks() -> None:
    one = Load(backlog_tokens=10, slo_deviation=0.5, busy_share=0.25)
    both = Load.of_ranks([one, IDLE])
    assert both == Load(backlog_tokens=10, slo_deviation=0.5, busy_share=0.125)


def test_class_times_are_averaged_if_all_dp_ranks_report() -> None:
    telling = Load(
        backlog_tokens=0.0, slo_deviation=0.0, busy_share=0.0,
        backlog_s=ByClass(short=1.0, long=8.0), busy_s=ByClass(short=3.0, long=6.0),
    )  # fmt: skip
    other = msgspec.structs.replace(
        telling, backlog_s=ByClass(short=2.0, long=0.0), busy_s=ByClass(short=4.0, long=7.0)
    )
    both = Load.of_ranks([telling, other])
    assert (both.backlog_s, both.busy_s) == (ByClass(short=1.5, long=4.0), ByClass(short=3.5, long=6.5))
    for silent in ([telling, IDLE], [IDLE]):
        said = Load.of_ranks(silent)
        assert said.backlog_s is said.busy_s is None


def test_classify_returns_class_names_of_protocol() -> None:
    assert (classify(1, 1), classify(2, 1)) == CLASSES
