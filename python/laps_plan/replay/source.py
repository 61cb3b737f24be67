"""Recordings of a running server, from its status and its latest receipts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from laps_core import protocol
from laps_core.protocol import STATUS_ROUTE
from laps_core.receipts.quote import QuoteState
from laps_core.receipts.receipt import RECEIPTS_ROUTE, Cause, Receipt, Receipts

from laps_plan import asking
from laps_plan.traffic.recording import Head, Recorded, Recording

TIMEOUT_S = 30.0
BEFORE: tuple[Cause, ...] = ("tokenizing", "decode_room", "host_load", "prefetch")
AFTER: tuple[Cause, ...] = ("transfer", "answering", "decode_server")
HOST: tuple[Cause, ...] = ("scheduling",)
"""Causes independent of the policy. A replay keeps BEFORE and AFTER as recorded; HOST gives the profile's host time."""


def fetch(url: str, seconds: float) -> Recording:
    """Return a recording of the last seconds of the prefill server at ``url``, requested with the key in the
    environment variable ``asking.KEY`` if it is set.

    Raises ValueError (one line) if the server cannot be recorded.
    """
    said = _get(url, STATUS_ROUTE, dict[str, Any])
    receipts = _get(url, f"{RECEIPTS_ROUTE}?seconds={seconds:g}", Receipts).receipts
    if not said.get("enabled"):
        raise ValueError(f"{url}: LAPS is off there, so that it has no receipts")
    if (said.get("group") or {}).get("on"):
        raise ValueError(f"{url}: its data-parallel ranks plan their steps together; that is not replayed")
    if said.get("decode"):
        raise ValueError(f"{url}: this server decodes, too; only prefill servers are replayed")
    if not said.get("quote"):
        raise ValueError(f"{url}: its latency model is not fitted yet")
    state = protocol.read(said["quote"], QuoteState)
    slices = said.get("slices") or {}
    head = Head(
        model=state.model,
        config=dict(said.get("config") or {}),
        chunk=state.chunk,
        layers=state.layers,
        launch_s=float(slices.get("launch_ms") or 0.0) / 1e3,
        overlap=bool(said.get("overlap")),
    )
    return Recording(head, of_receipts(receipts))


def of_receipts(receipts: Collection[Receipt]) -> list[Recorded]:
    """Return the requests of these receipts, except those aborted or without a TTFT; the first arrives at 0."""
    done = sorted((r for r in receipts if not r.aborted and r.ttft_ms > 0.0), key=lambda r: r.arrived_s)
    return [
        Recorded(
            arrival_ms=1e3 * (r.arrived_s - done[0].arrived_s),
            new_tokens=max(1, r.new_tokens),
            cached_tokens=r.cached_tokens,
            output_tokens=r.output_tokens,
            cls=r.cls,
            ttft_ms=r.ttft_ms,
            before_ms=_sum(r, BEFORE),
            after_ms=_sum(r, AFTER),
            host_ms=_sum(r, HOST),
            rank=r.dp_rank,
        )
        for r in done
    ]


def _sum(receipt: Receipt, causes: Collection[Cause]) -> float | None:
    return sum(receipt.causes.get(cause, 0.0) for cause in causes) if receipt.causes else None


def _get(url: str, route: str, kind: Any) -> Any:
    body = asking.get(url, route, TIMEOUT_S)
    try:
        return protocol.read(body, kind)
    except ValueError as e:
        raise ValueError(f"{url.rstrip('/')}/{route}: {e}") from None
