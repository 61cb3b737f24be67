"""A request body on its way to the servers: parsed once, and added to without being serialised again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson
from laps_core import deadline
from laps_core.protocol import DEADLINE_FIELD, DEADLINE_HEADER

from .prompt import GENERATE

DEEP = 900
"""The standard library, and so MiniLB, gives up near a thousand levels."""
_MEDIA = ("input_embeds", "image_data", "video_data", "audio_data")
ROUTED = frozenset(("bootstrap_host", "bootstrap_port", "bootstrap_room"))
"""Members that the router sets."""
_NUMBER = re.compile(r"[-+.0-9eE]+", re.ASCII)
_BRACKETS = re.compile(rb"[\[\]{}]")


class BadRequest(ValueError):
    """A request that the router answers 400. The message names what is wrong."""


def read_json(raw: bytes) -> Any:
    """The JSON value in ``raw``, read as the standard library does but faster. Raises ValueError.

    What that one takes beyond the standard (NaN, lone surrogates, UTF-16) MiniLB takes too.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _read_text(_decode(raw))


def write_json(value: Any) -> bytes:
    """Serialise what ``read_json`` gave; NaN becomes null. Raises ValueError where it is nested too deeply."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return _write_any(value)


def parse(raw: bytes) -> tuple[bytes, Any] | None:
    """``raw`` as UTF-8, and the JSON value in it; None when it holds none, or one nested deeper than MiniLB reads."""
    if _nested(raw) and _read_text_or_none(raw) is None:
        return None
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            text = _decode(raw)
            body = _read_text(text)
        except ValueError:
            return None
        # A surrogate can only stand inside a string, where its escape means the same.
        raw = text.encode("utf-8", "backslashreplace")
    return raw, body


def _nested(raw: bytes) -> bool:
    """Whether brackets may be open DEEP deep; those in strings count too."""
    if raw.count(b"[") + raw.count(b"{") < DEEP:
        return False
    depth = most = 0
    for bracket in _BRACKETS.finditer(raw):
        depth += 1 if bracket[0] in b"[{" else -1
        most = max(most, depth)
    return most >= DEEP


def _read_text_or_none(raw: bytes) -> Any:
    try:
        return _read_text(_decode(raw))
    except ValueError:
        return None


def _decode(raw: bytes) -> str:
    # Raises UnicodeDecodeError, a ValueError.
    return raw.decode(json.detect_encoding(raw), "surrogatepass")


def _read_text(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def _write_any(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def without_routed(raw: bytes, body: Mapping[str, Any]) -> bytes:
    """``raw`` without the client's own ROUTED members: what stands there may be no JSON that a server reads."""
    if not ROUTED & body.keys():
        return raw
    try:
        # As the standard library reads it: numbers of any size stay what they are.
        return _write_any({k: v for k, v in json.loads(raw).items() if k not in ROUTED})
    except ValueError:
        return raw


def splice(raw: bytes, body: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """``raw`` with the members of ``extra`` added at its end; all its bytes stay as they are.

    ``raw`` and ``body`` are what ``parse`` gave. Of members with one name JSON parsers take the last: ours.
    """
    return splice_text(raw, body, orjson.dumps(extra))


def splice_text(raw: bytes, body: Mapping[str, Any], extra: bytes) -> bytes:
    """``splice`` of an object that is serialised already."""
    return b"%b,%b" % (raw.rstrip()[:-1], extra[1:]) if body else extra


def read_deadline(texts: list[str]) -> float:
    """The deadline for the first token (milliseconds after arrival) in the headers of that name.

    Raises BadRequest.
    """
    if len(texts) > 1:
        raise BadRequest(f"header {DEADLINE_HEADER}: given {len(texts)} times")
    try:
        value = float(texts[0]) if _NUMBER.fullmatch(texts[0]) else math.nan
    except ValueError:
        value = math.nan
    if not deadline.valid(value):
        raise BadRequest(f"header {DEADLINE_HEADER}: {texts[0]!r} is not {deadline.RANGE}")
    return value


def add_deadline(endpoint: str, raw: bytes, body: Mapping[str, Any], slo_ms: float) -> tuple[bytes, dict[str, Any]]:
    """``raw`` and ``body`` with the deadline where the prefill scheduler looks for it: the custom sampling parameters.

    A deadline the body already carries stays. Raises BadRequest where the parameters are nested too deeply.
    """
    member = _deadline_member(endpoint, body, slo_ms)
    try:
        text = _write_any(member)
    except ValueError as e:
        raise BadRequest(f"header {DEADLINE_HEADER}: the request's sampling parameters are {e}") from None
    return splice_text(raw, body, text), {**body, **member}


def _deadline_member(endpoint: str, body: Mapping[str, Any], slo_ms: float) -> dict[str, Any]:
    if endpoint != GENERATE:
        return {"custom_params": _with(body.get("custom_params"), slo_ms)}
    params = body.get("sampling_params")
    if isinstance(params, list):
        return {"sampling_params": [_in_params(p, slo_ms) for p in params]}
    return {"sampling_params": _in_params(params, slo_ms)}


def _in_params(params: Any, slo_ms: float) -> Any:
    if params is not None and not isinstance(params, dict):
        return params
    params = params or {}
    return {**params, "custom_params": _with(params.get("custom_params"), slo_ms)}


def _with(custom: Any, slo_ms: float) -> Any:
    if custom is not None and not isinstance(custom, dict):
        return custom
    return {DEADLINE_FIELD: slo_ms, **(custom or {})}


def refuse_empty(endpoint: str, body: Mapping[str, Any]) -> None:
    """Raise BadRequest where a text to generate from is empty: stock servers do not survive it."""
    if endpoint != GENERATE or any(body.get(name) for name in ("input_ids", *_MEDIA)):
        return
    text = body.get("text")
    if text == "" or (isinstance(text, list) and "" in text):
        raise BadRequest("text: the prompt is empty")


def refuse_samples(endpoint: str, body: Mapping[str, Any]) -> None:
    """Raise BadRequest where more than one sample of a prompt is asked for.

    A prefill and a decode server meet in one room per prompt. Of several samples each side makes rooms of its own:
    they never meet, and the client waits until it gives up.
    """
    if endpoint != GENERATE:
        _refuse_n(body)
        return
    params = body.get("sampling_params")
    for one in params if isinstance(params, list) else (params,):
        # A beam search returns n of its beams, without another request.
        if isinstance(one, dict) and not _above_one(one.get("beam_width")):
            _refuse_n(one)


def _refuse_n(params: Mapping[str, Any]) -> None:
    n = params.get("n")
    if n is not None and _above_one(n):
        raise BadRequest("n: only one sample per prompt is served here; send the request once for each sample")


def _above_one(n: Any) -> bool:
    if isinstance(n, str):
        # The servers read numbers in strings as numbers.
        try:
            n = float(n)
        except ValueError:
            return False
    return isinstance(n, (int, float)) and n > 1
