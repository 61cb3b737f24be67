"""SGLang's transfers of KV to decode servers, and what ends them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from sglang_laps import seams

TCP = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "30000",
}
"""Mooncake over TCP queues 1,024 pieces for a decode server and fails what is more; a long prompt whose KV lies
scattered has thousands, and more of it is scattered where prompts take turns."""

PROBE = {"SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": "5", "SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S": "30"}
"""After one failed transfer SGLang fails every other to that decode server until it has probed it, by default 30 s
later and then ever less often, up to every 300 s."""

MANAGER = "disaggregation.common.conn.CommonKVManager"
_writing = threading.RLock()


def be_patient() -> None:
    """Set in the environment of a prefill server's scheduler what the user has not."""
    for name, value in TCP.items():
        os.environ.setdefault(name, value)
    # One of the two bounds the other.
    if not PROBE.keys() & os.environ.keys():
        os.environ.update(PROBE)


def mend() -> None:
    """Hook what is wrong with the books that SGLang's threads keep of transfers together."""
    seams.hook(f"{MANAGER}.__init__", forgive, "AFTER")
    seams.hook(f"{MANAGER}.check_status", check_status, "AROUND")
    seams.hook(f"{MANAGER}.update_status", update_status, "AROUND")


def check_status(original: Callable[[Any, int], Any], manager: Any, bootstrap_room: int) -> Any:
    """Around ``CommonKVManager.check_status``.

    A transfer thread asks whether a room is there and then for its status; a scheduler that polls in between takes a
    transfer that is done off the books. Stock SGLang raises KeyError then, the thread ends, and every later transfer of
    its queue times out. LAPS polls after each batch and each slice, so it would meet this more often. A room that is
    gone has concluded: "failed" has the thread tidy up and go on.
    """
    try:
        return original(manager, bootstrap_room)
    except KeyError:
        if threading.current_thread() is threading.main_thread():
            raise
        from sglang.srt.disaggregation.base.conn import KVPoll

        return KVPoll.Failed


def update_status(original: Callable[[Any, int, Any], None], manager: Any, bootstrap_room: int, status: Any) -> None:
    """Around ``CommonKVManager.update_status``: one thread at a time.

    It reads the status of a room, and then writes. The scheduler opens a room while another thread hears from the
    decode server that it is ready; where stock SGLang has the first write last, the request waits until it times out
    (300 s).
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    if status == KVPoll.Failed and manager.deferred_bootstrap is not None:
        original(manager, bootstrap_room, status)  # it writes without reading, and tells a peer that may be dead
        return
    with _writing:
        original(manager, bootstrap_room, status)


class Rooms(dict[int, dict[str, Any]]):
    """A prefill server's ``transfer_infos``: what decode servers have said of each room.

    The thread that hears them looks whether a room is there and then writes to it; a request that is aborted in between
    takes the room off the books. Stock SGLang raises KeyError then, the thread ends, and no request ever gets through
    that server again. Here the room is there again, as it is where a decode server's word comes after the abort.
    """

    def __missing__(self, room: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self[room] = found
        return found

    def pop(self, room: int, default: Any = None) -> Any:
        """None where it is gone: a transfer that ends meets an abort in the same way."""
        return super().pop(room, default)


def forgive(_: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    """After ``CommonKVManager.__init__``: nothing has been heard yet."""
    if type(getattr(manager, "transfer_infos", None)) is dict:
        manager.transfer_infos = Rooms(manager.transfer_infos)
