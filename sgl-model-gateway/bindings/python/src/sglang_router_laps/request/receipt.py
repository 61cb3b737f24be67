"""Receipt of a request: its prefill server's receipt, with the time that the request spent elsewhere."""

from __future__ import annotations

import contextlib
import json
import time

from laps_core.receipts.receipt import RECEIPT_HEADER

from .trail import Trail

HEADER = RECEIPT_HEADER.encode()
LAST = ("answering", "transfer", "computing")
"""Causes at a prefill server that may still last when the decode server has the first token, latest cause first."""


def asks(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return True if a client wants the receipt of its request."""
    return (HEADER, b"1") in headers


def complete(receipt: str, trail: Trail) -> bytes | None:
    """Return the receipt of the request (JSON): its prefill server's ``receipt``, with the time at the router and until
    the decode server's first token. None if the request has no first token, or if ``receipt`` is no receipt."""
    if trail.first is None or trail.sent is None or trail.first_sent is None:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        found = json.loads(receipt)
        causes = {cause: round(1e3 * ms) for cause, ms in found["causes"].items()}
        total = _us(trail.first - trail.began)
        causes["router_queue"] = _us(trail.placed[1] - trail.placed[0]) if trail.placed else 0
        causes["router_retries"] = _us(trail.sent - trail.first_sent)
        causes["decode_server"] = _us(max(0.0, trail.first - (trail.prefilled or trail.first)))
        causes["router"] = total - sum(causes.values())
        for cause in LAST:
            if causes["router"] < 0 and cause in causes:
                over = min(causes[cause], -causes["router"])
                causes[cause] -= over
                causes["router"] += over
        causes["router"] = max(0, causes["router"])
        found["causes"] = {cause: us / 1e3 for cause, us in causes.items() if us}
        found["ttft_ms"] = sum(causes.values()) / 1e3
        found["arrived_s"] = time.time() - (time.monotonic() - trail.began)
        return json.dumps(found, separators=(",", ":")).encode()
    return None


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
