"""A request body on its way to the servers: parsed once, and rewritten without being serialised again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson
from sglang_laps.policy import deadline

from .prompt import GENERATE

SLO_HEADER = "x-sgl-ttft-slo-ms"


class BadDeadline(ValueError):
    """The deadline header is no number of milliseconds. The message names the header."""


def parse(raw: bytes) -> dict[str, Any] | None:
    """The JSON object in ``raw``, or None when it holds none."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        # What the standard parser takes beyond the standard (NaN, very large numbers) MiniLB takes too.
        try:
            body = json.loads(raw)
        except ValueError:
            return None
    return body if isinstance(body, dict) else None


def splice(raw: bytes, body: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """``raw`` with the members of ``extra`` added at its end; serialised anew only to replace a member.

    ``body`` is what ``parse`` made of ``raw``.
    """
    if body.keys() & extra.keys():
        return dump({**body, **extra})
    tail = orjson.dumps(extra)
    if not body:
        return tail
    return b"%b,%b" % (raw.rstrip()[:-1], tail[1:])


def dump(body: Mapping[str, Any]) -> bytes:
    """Serialise; numbers that orjson does not know fall to the standard library."""
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body).encode()


def read_deadline(text: str) -> float:
    """The deadline for the first token (milliseconds after arrival). Raises BadDeadline."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not deadline.valid(value):
        raise BadDeadline(f"header {SLO_HEADER}: {text!r} is not {deadline.RANGE}")
    return value


def with_deadline(endpoint: str, body: Mapping[str, Any], slo_ms: float) -> dict[str, Any]:
    """``body`` with the deadline where the prefill scheduler looks for it: the custom sampling parameters.

    A deadline the body already carries stays.
    """
    if endpoint != GENERATE:
        return {**body, "custom_params": _with(body.get("custom_params"), slo_ms)}
    params = body.get("sampling_params")
    if isinstance(params, list):
        return {**body, "sampling_params": [_in_params(p, slo_ms) for p in params]}
    return {**body, "sampling_params": _in_params(params, slo_ms)}


def _in_params(params: Any, slo_ms: float) -> Any:
    if params is not None and not isinstance(params, dict):
        return params
    params = params or {}
    return {**params, "custom_params": _with(params.get("custom_params"), slo_ms)}


def _with(custom: Any, slo_ms: float) -> Any:
    if custom is not None and not isinstance(custom, dict):
        return custom
    return {"ttft_slo_ms": slo_ms, **(custom or {})}
