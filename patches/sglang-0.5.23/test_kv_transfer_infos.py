"""The bootstrap thread of a prefill server survives an abort that clears the room it is working on."""

import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake import conn as mooncake
from sglang.srt.disaggregation.nixl import conn as nixl
from sglang.srt.disaggregation.utils import DisaggregationMode

BACKENDS = pytest.mark.parametrize(
    ("module", "name"), [(mooncake, "MooncakeKVManager"), (nixl, "NixlKVManager")], ids=["mooncake", "nixl"]
)


class Aborted(dict[int, dict[str, Any]]):
    """Room 1 is cleared as soon as it is there."""

    def __setitem__(self, room: int, infos: dict[str, Any]) -> None:
        if room != 1:
            super().__setitem__(room, infos)

    def setdefault(self, room: int, default: Any = None) -> Any:
        return default if room == 1 else super().setdefault(room, default)


class Cleared(dict[int, Any]):
    """A room is cleared once somebody has seen that it is there."""

    def __contains__(self, room: object) -> bool:
        found = super().__contains__(room)
        self.clear()
        return found


@BACKENDS
def test_bootstrap_thread(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(decode_prefix_len=None, required_dst_info_num=1, dst_port=1)
    monkeypatch.setattr(module, "TransferInfo", SimpleNamespace(from_zmq=lambda parts: info))
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.set())
    guard = [nixl.GUARD] if module is nixl else []
    # The thread reads the room, the session and the number of peers to come.
    pending = [[*guard, room, b"", b"", b"host:1", b"", b"", b"", b"1"] for room in (b"1", b"2")]
    ready: list[int] = []

    def receive() -> list[bytes]:
        if pending:
            return pending.pop(0)
        ended.set()
        raise EOFError

    manager = object.__new__(getattr(module, name))
    vars(manager).update(
        transfer_infos=Aborted(), req_to_decode_prefix_len={}, _worker_threads=[], _stopped=False, enable_staging=False,
        update_status=lambda room, status: ready.append(room), resolve_kv_replica_factor=lambda infos: None,
        server_socket=SimpleNamespace(recv_multipart=receive), _make_worker_recv=lambda socket: receive,
        _handle_abort_notification=lambda parts: False, kv_args=SimpleNamespace(engine_rank=0),
    )  # fmt: skip
    manager._start_bootstrap_thread() if module is nixl else manager.start_prefill_thread()
    assert ended.wait(10)
    time.sleep(0.05)  # the hook for exceptions stays until the thread has ended
    assert ready == [1, 2]


@BACKENDS
def test_request_cleared_while_it_is_queued(module: ModuleType, name: str) -> None:
    manager = object.__new__(getattr(module, name))
    vars(manager).update(
        disaggregation_mode=DisaggregationMode.PREFILL, request_status={7: KVPoll.WaitingForInput},
        transfer_infos=Cleared({7: {"host:1": SimpleNamespace(dst_port=1)}}), transfer_queues=[Mock()],
        enable_staging=False, _staging_outstanding={7: 0},
    )  # fmt: skip
    manager.add_transfer_request(7, None, slice(0), False)
    assert manager.transfer_queues[0].put.called
