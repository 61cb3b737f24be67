"""Settings and corrections for SGLang's KV transfers to decode servers."""

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
"""Mooncake over TCP queues 1,024 parts for a decode server and fails all further parts. A long prompt with scattered KV
has thousands of parts, and KV is more scattered when prompts take turns."""

PROBE = {"SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": "5", "SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S": "30"}
"""After one failed transfer SGLang fails every other transfer to that decode server until a probe succeeds. By default
SGLang probes first after 30 s, then less and less often, up to every 300 s."""

MANAGER = "disaggregation.common.conn.CommonKVManager"
_writing = threading.RLock()


def set_environment() -> None:
    """Set these variables in the environment of a prefill server's scheduler, unless the user has set them."""
    for name, value in TCP.items():
        os.environ.setdefault(name, value)
    # One variable bounds the other, so both are set or none.
    if not PROBE.keys() & os.environ.keys():
        os.environ.update(PROBE)


def hook_races() -> None:
    """Register hooks on the methods whose races corrupt the transfer records that SGLang's threads share."""
    seams.hook(f"{MANAGER}.__init__", tolerate_missing_rooms, "AFTER")
    seams.hook(f"{MANAGER}.check_status", check_status, "AROUND")
    seams.hook(f"{MANAGER}.update_status", update_status, "AROUND")


def check_status(original: Callable[[Any, int], Any], manager: Any, bootstrap_room: int) -> Any:
    """Wrap ``CommonKVManager.check_status``: report a missing bootstrap room as failed to a transfer thread.

    A transfer thread checks that a room exists, and then reads its status. A scheduler that polls in between removes a
    finished transfer. Stock SGLang then raises KeyError, the thread ends, and every later transfer of its queue times
    out. LAPS polls after each batch and each slice, so this would happen more often. A missing room has concluded: with
    the status "failed" the thread cleans up and goes on.
    """
    try:
        return original(manager, bootstrap_room)
    except KeyError:
        if threading.current_thread() is threading.main_thread():
            raise
        from sglang.srt.disaggregation.base.conn import KVPoll

        return KVPoll.Failed


def update_status(original: Callable[[Any, int, Any], None], manager: Any, bootstrap_room: int, status: Any) -> None:
    """Wrap ``CommonKVManager.update_status``: one thread at a time.

    The method reads the status of a room, and then writes it. The scheduler opens a room while another thread learns
    that the decode server is ready. If stock SGLang writes the opening status last, the request waits until it times
    out (300 s).
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    if status == KVPoll.Failed and manager.deferred_bootstrap is not None:
        original(manager, bootstrap_room, status)  # it writes without reading, and notifies a peer that may be dead
        return
    with _writing:
        original(manager, bootstrap_room, status)


class Rooms(dict[int, dict[str, Any]]):
    """``transfer_infos`` of a prefill server: the reports of decode servers for each bootstrap room.

    The thread that receives the reports checks that a room exists, and then writes to it. An abort in between removes
    the room. Stock SGLang then raises KeyError, the thread ends, and no request ever gets through that server again.
    Here the room is created again, as when a report of a decode server comes after the abort.
    """

    def __missing__(self, room: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self[room] = found
        return found

    def pop(self, room: int, default: Any = None) -> Any:
        """Remove a room and return it, or `default` if it is gone: an abort can come before the end of a transfer."""
        return super().pop(room, default)


def tolerate_missing_rooms(_: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``transfer_infos`` after ``CommonKVManager.__init__``, before any report has been received."""
    if type(getattr(manager, "transfer_infos", None)) is dict:
        manager.transfer_infos = Rooms(manager.transfer_infos)
