"""Environment variables of a prefill server for the transfer engine."""

from __future__ import annotations

import os

import pytest
from sglang_laps import transfers


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*transfers.TCP, *transfers.PROBE):
        monkeypatch.delenv(name, raising=False)
        # Set and deleted, so that monkeypatch later restores a value that the test sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_environment_allows_many_queued_transfers_and_early_probes() -> None:
    transfers.set_environment()
    assert int(os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"]) > 50_000
    assert float(os.environ["SGLANG_FAILED_SESSION_PROBE_INTERVAL_S"]) <= 5


def test_user_environment_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "7")
    # SGLang refuses a first value that is larger than the second.
    monkeypatch.setenv("SGLANG_FAILED_SESSION_PROBE_INTERVAL_S", "60")
    transfers.set_environment()
    assert os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "7"
    assert os.environ["SGLANG_FAILED_SESSION_PROBE_INTERVAL_S"] == "60"
    assert "SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S" not in os.environ
