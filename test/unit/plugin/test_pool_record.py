"""Pool record of a server: compare and set, by any process of the server."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from laps_core.protocol import PoolRecord, Status, read, read_status
from sglang_laps.http.pool import ENV, PoolCell


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> PoolCell:
    monkeypatch.setenv(ENV, "")
    return PoolCell.make()


def change(assignment: object, if_version: object) -> bytes:
    return msgspec.json.encode({"assignment": assignment, "if_version": if_version})


def test_new_server_is_in_no_pool(cell: PoolCell) -> None:
    assert cell.read() == PoolRecord(assignment=None, version=0)


def test_pool_change_needs_current_version(cell: PoolCell) -> None:
    assert cell.apply_change(change("short", 0)) == (200, b'{"assignment":"short","version":1}')
    assert cell.apply_change(change("long", 0)) == (409, b'{"assignment":"short","version":1}')
    assert cell.apply_change(change("both", 1)) == (200, b'{"assignment":"both","version":2}')
    assert PoolCell.of_this_server().read() == PoolRecord(assignment="both", version=2)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", change("middle", 0), change("short", -1), change("short", True), change("short", 0.5),
        change(None, 0), b'{"assignment": "short"}', b'{"assignment": "short", "if_version": 0, "more": 1}',
        b'{"assignment": "short", "if_version": 1e999}', b"\xff",
    ],
)  # fmt: skip
def test_invalid_pool_change_returns_400_and_changes_nothing(cell: PoolCell, body: bytes) -> None:
    status, said = cell.apply_change(body)
    assert status == 400
    assert msgspec.json.decode(said)["error"]["message"]
    assert cell.read().version == 0


SET_50_TIMES = """
from sglang_laps.http.pool import PoolCell
cell = PoolCell.of_this_server()
for _ in range(50):
    while cell.apply_change(b'{"assignment": "long", "if_version": %d}' % cell.read().version)[0] != 200:
        pass
"""


def test_no_pool_change_of_concurrent_processes_is_lost(cell: PoolCell) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", SET_50_TIMES]) for _ in range(2)]
    assert [w.wait(300) for w in workers] == [0, 0]
    assert cell.read() == PoolRecord(assignment="long", version=100)


def test_pool_record_is_kept_in_memory_file(cell: PoolCell) -> None:
    assert "memfd" in os.readlink(os.environ[ENV])


def test_status_may_omit_pool_record() -> None:
    assert "pool" not in Status(enabled=True).as_dict()
    assert read_status(b'{"enabled": true}').pool is msgspec.UNSET
    said = read_status(b'{"enabled": true, "pool": {"assignment": null, "version": 0}}').pool
    assert said == PoolRecord()
    with pytest.raises(ValueError, match="assignment"):
        read(b'{"assignment": "x"}', PoolRecord)
