"""SGLang's transfers of KV to decode servers, and what ends them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

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

CHECK_STATUS = "sglang.srt.disaggregation.common.conn.CommonKVManager.check_status"


def be_patient() -> None:
    """Set in the environment of a prefill server's scheduler what the user has not."""
    for name, value in TCP.items():
        os.environ.setdefault(name, value)
    # One of the two bounds the other.
    if not PROBE.keys() & os.environ.keys():
        os.environ.update(PROBE)


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
