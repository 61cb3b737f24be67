"""After a campaign: every counter at zero, every KV token free."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from typing import Any

from benchmark.faults.fleet import Fleet, Member

LIMIT_S = 90.0
"""Servers give up on what a dead peer owes them after 30 s; see ``fleet.SHORT_WAITS``."""


async def at_rest(fleet: Fleet, limit_s: float = LIMIT_S) -> list[str]:
    """Wait until nothing is in flight anywhere and no KV token is held; what still is after ``limit_s``."""
    end = time.monotonic() + limit_s
    while True:
        found = await asyncio.to_thread(_found, fleet)
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(1.0)


def _found(fleet: Fleet) -> list[str]:
    found = []
    try:
        status = fleet.status()
        if status["in_flight"]:
            found.append(f"router: {status['in_flight']} requests in flight")
        found += [
            f"router: {i['outstanding_requests']} requests and {i['outstanding_tokens']} tokens at {i['url']}"
            for i in (*status["prefill"], *status["decode"])
            if i["outstanding_requests"] or i["outstanding_tokens"]
        ]
    except (OSError, ValueError) as e:
        found.append(f"router: {e}")
    for m in fleet.members:
        found += _of_server(m)
    return found


def _of_server(m: Member) -> list[str]:
    try:
        loads = _get(m, "/v1/loads?include=core")["loads"]
        busy = sum(x["num_running_reqs"] + x["num_waiting_reqs"] for x in loads)
        if busy:
            return [f"{m.name}: {busy} requests running or waiting"]
        with urllib.request.urlopen(urllib.request.Request(m.server.url + "/flush_cache", method="POST"), timeout=30):
            pass
        held = sum(x["num_used_tokens"] for x in _get(m, "/v1/loads?include=core")["loads"])
        return [f"{m.name}: {held} KV tokens are held"] if held else []
    except urllib.error.HTTPError as e:
        return [f"{m.name}: {e.url.rpartition('/')[2]} answered {e.code}: {e.read()[:100]!r}"]
    except (OSError, ValueError, KeyError) as e:
        return [f"{m.name}: {type(e).__name__}: {e}"]


def _get(m: Member, path: str) -> Any:
    with urllib.request.urlopen(m.server.url + path, timeout=30) as reply:
        return json.load(reply)
