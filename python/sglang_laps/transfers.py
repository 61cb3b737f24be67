"""SGLang's transfer threads, and what ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

CHECK_STATUS = "sglang.srt.disaggregation.common.conn.CommonKVManager.check_status"


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
