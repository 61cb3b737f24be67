"""A status that another thread sets while a room is updated is neither lost nor undone."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVSender


class Interrupted(dict[int, int]):
    """Starts another thread after the first read of a status, and gives it a fifth of a second."""

    other: threading.Thread

    def get(self, room: int, default: Any = None) -> Any:
        found = super().get(room, default)
        if self.other.ident is None:
            self.other.start()
            self.other.join(0.2)
        return found


def make_manager(rooms: dict[int, int], deed: Callable[[Any], None]) -> Any:
    manager = object.__new__(CommonKVManager)
    manager._status_lock = threading.Lock()
    manager._deferred_ack_targets, manager._staging_outstanding = {}, {}
    manager._deferred_ack_poisoned_rooms = set()
    manager.deferred_bootstrap = None
    manager.req_to_decode_prefix_len, manager.transfer_infos, manager._staging_ctx = {}, {}, None
    manager._maybe_ack_drained_abort = lambda room: None
    manager.request_status = Interrupted(rooms)
    manager.request_status.other = threading.Thread(target=deed, args=(manager,))
    return manager


def test_ready_while_the_room_opens() -> None:
    manager = make_manager({}, lambda m: m.update_status(7, KVPoll.WaitingForInput))
    manager.update_status(7, KVPoll.Bootstrapping)
    manager.request_status.other.join()
    assert manager.request_status[7] == KVPoll.WaitingForInput


def test_failed_while_it_succeeds() -> None:
    manager = make_manager({7: KVPoll.Transferring}, lambda m: m.update_status(7, KVPoll.Failed))
    manager.update_status(7, KVPoll.Success)
    manager.request_status.other.join()
    assert manager.request_status[7] == KVPoll.Failed


def test_cleared_while_it_succeeds() -> None:
    def clear(manager: Any) -> None:
        sender = object.__new__(CommonKVSender)
        sender.kv_mgr, sender.bootstrap_room, sender.conclude_state = manager, 7, KVPoll.Failed
        sender.clear()

    manager = make_manager({7: KVPoll.Transferring}, clear)
    manager.update_status(7, KVPoll.Success)
    manager.request_status.other.join()
    assert 7 not in manager.request_status


@pytest.mark.parametrize("room", [7, 8])
def test_peers_are_told_of_a_failed_room_without_the_lock(room: int) -> None:
    manager = make_manager({7: KVPoll.Transferring}, lambda m: None)
    manager.deferred_bootstrap = SimpleNamespace(fail=lambda room: ("peer", True))
    held = []
    manager._notify_bootstrap = lambda *_: held.append(manager._status_lock.locked())
    manager.update_status(room, KVPoll.Failed)
    assert held == ([False] if room == 7 else [])


def test_the_manager_makes_the_lock() -> None:
    assert "_status_lock" in CommonKVManager.__init__.__code__.co_names
