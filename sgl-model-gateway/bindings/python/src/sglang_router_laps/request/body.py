"""Request bodies: read as a whole, parsed once, and extended without being serialised again."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson
from laps_core import deadline
from laps_core.protocol import DEADLINE_FIELD, DEADLINE_HEADER
from laps_core.refusals import LABELS, NO_OVERRIDES, ONE_SAMPLE, OVERRIDES, misplaced, several_samples
from sglang_router.router_args import RouterArgs
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from ..memory import HOLD, Hold
from ..prompts.reading import CHAT, GENERATE, batch_size
from .replies import INVALID, BadRequest, Rejection, refusal

PAUSE_S = 30.0
"""Longest silence of a client in the middle of a body (seconds): TCP has retransmitted several times by then."""
SLOWEST = 1 << 14
"""Least arrival rate of a body after the first PAUSE_S (bytes/s)."""
PARTS_MAX = 8192
"""Most prompts of a batch, or messages and parts of a chat. While they are inspected, all other requests wait."""
DEEP = 900
"""Lists and objects from which the standard library also parses a body: as MiniLB, it fails near a thousand levels."""
LISTS_MAX = 200_000
"""Most lists and objects of a body. Each takes sixty bytes in memory; while they are made, all other requests wait."""
ROUTED = frozenset(("bootstrap_host", "bootstrap_port", "bootstrap_room"))
"""Members of a body that the router sets."""
PREFILL_RANK = "disagg_prefill_dp_rank"
"""Member that names the prefill server's data-parallel rank to both servers."""
RANKS = frozenset((PREFILL_RANK, "routed_dp_rank", "data_parallel_rank"))
RANK_HEADER = "x-data-parallel-rank"
"""Members (RANKS) and header by which a client itself names data-parallel ranks."""
LATE_HEADER = "x-sgl-ttft-slo-late"
"""Header that says whether to serve or refuse a request that can no longer meet its deadline."""
SESSION_HEADERS = ("x-smg-routing-key", "x-session-id")
SESSION_LONGEST = 256
"""Longest session name (characters)."""
_NUMBER = re.compile(r"[-+.0-9eE]+", re.ASCII)


async def read_body(scope: Scope, receive: Receive, args: RouterArgs) -> bytes:
    """Return the whole body.

    Raises ClientDisconnect; TurnedAway if the bodies of all requests would exceed their budget; and Rejection if the
    body exceeds --max-payload-size, takes over --request-timeout-secs, is slower than SLOWEST or stops for PAUSE_S.
    """
    hold: Hold = scope[HOLD]
    hold.unread = True
    limit, timeout_s = args.max_payload_size, args.request_timeout_secs
    # uvicorn has checked that the header is a number.
    declared = next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(min(PAUSE_S, timeout_s)) as patience:
            while max(size, declared) <= limit:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientDisconnect
                chunk = message["body"]
                size += len(chunk)
                if size > limit:
                    break
                hold.take(len(chunk))
                chunks.append(chunk)
                if not message.get("more_body"):
                    hold.unread = False
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
                slow = began + PAUSE_S + size / SLOWEST
                patience.reschedule(min(loop.time() + PAUSE_S, slow, began + timeout_s))
    except TimeoutError:
        raise Rejection(refusal(408, "request_timeout", "the body did not arrive in time")) from None
    raise Rejection(refusal(413, "payload_too_large", f"the body is larger than {limit} bytes"))


def require_json(scope: Scope) -> None:
    """Raise Rejection, with MiniLB's status, if the body is not declared as JSON: browsers let any web page send such a
    body to a router in the user's network without a CORS preflight."""
    said = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    kind, slash, form = said.partition(b";")[0].strip().lower().partition(b"/")
    if not (kind == b"application" and slash and (form == b"json" or (form.endswith(b"+json") and b"/" not in form))):
        detail = "the body is not declared as JSON: content-type: application/json"
        raise Rejection(refusal(422, INVALID, detail))


def read_json(raw: bytes) -> Any:
    """Return the JSON value in ``raw``: the standard library's result, but faster. Raises ValueError.

    Accepts the standard library's extensions (NaN, lone surrogates, UTF-16), because MiniLB accepts them.
    """
    return _read(raw)[1]


def write_json(value: Any) -> bytes:
    """Serialise a value of ``read_json``; NaN becomes null. Raises ValueError if it is nested too deeply."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return _write_slowly(value)


def parse(raw: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return ``raw`` as UTF-8, and the JSON object in ``raw``. Raises Rejection, with MiniLB's status, if there is no
    JSON object, or if it is nested deeper than MiniLB can read."""
    try:
        if (lists := _count_lists(raw)) > LISTS_MAX:
            raise Rejection(refusal(413, "payload_too_large", f"there are more than {LISTS_MAX} lists and objects"))
        if lists >= DEEP:
            _read_slowly(raw)
        raw, body = _read(raw)
    except ValueError as e:
        # 400: not decodable, nested too deeply, or a number with too many digits.
        status = 422 if isinstance(e, json.JSONDecodeError) else 400
        raise Rejection(refusal(status, INVALID, f"the body is not JSON: {e}")) from None
    if not isinstance(body, dict):
        raise Rejection(refusal(422, INVALID, "the body is not a JSON object"))
    return raw, body


def _count_lists(raw: bytes) -> int:
    """Return the number of lists and objects in JSON text; below DEEP, brackets in strings may count, too."""
    count = raw.count(b"[") + raw.count(b"{")
    if count < DEEP:
        return count
    outside = b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")


def _read(raw: bytes) -> tuple[bytes, Any]:
    try:
        return raw, orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _read_slowly(raw)


def _read_slowly(raw: bytes) -> tuple[bytes, Any]:
    """Parse with the standard library. Raises ValueError (UnicodeDecodeError is one)."""
    text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    try:
        # A surrogate can occur only inside a string, where its escape sequence means the same.
        return text.encode("utf-8", "backslashreplace"), json.loads(text)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def _write_slowly(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def without_routed(raw: bytes, body: Mapping[str, Any]) -> bytes:
    """Return ``raw`` without the client's own ROUTED members, whose values a server might fail to parse."""
    if not ROUTED & body.keys():
        return raw
    try:
        # The standard library keeps numbers of any size unchanged.
        return _write_slowly({k: v for k, v in json.loads(raw).items() if k not in ROUTED})
    except ValueError:
        return raw


def splice(raw: bytes, body: Mapping[str, Any], extra: bytes) -> bytes:
    """Return ``raw`` with the members of the JSON object ``extra`` added at the end; all bytes of ``raw`` are kept.

    ``raw`` and ``body`` are results of ``parse``. JSON parsers take the last of members with the same name: ours.
    """
    return b"%b,%b" % (raw.rstrip()[:-1], extra[1:]) if body else extra


def names_rank(body: Mapping[str, bool], headers: Mapping[str, str]) -> bool:
    """Return True if the client itself has named a data-parallel rank. ``body``: whether each member has a value."""
    return any(map(body.get, RANKS)) or RANK_HEADER in headers


def read_deadline(texts: list[str]) -> float:
    """Return the deadline for the first token (milliseconds after arrival), from the values of its header.

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


def read_late(texts: list[str]) -> bool:
    """Return True if the header's values ask to refuse a late request. Raises BadRequest."""
    if texts not in ([], ["serve"], ["refuse"]):
        raise BadRequest(f"header {LATE_HEADER}: {', '.join(texts)!r} is neither refuse nor serve")
    return texts == ["refuse"]


def read_session(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Return the client's session name from the first of SESSION_HEADERS that is present, else from
    ``session_params.session_id``. None if there is no name or if it exceeds SESSION_LONGEST characters."""
    params = body.get("session_params")
    member = params.get("session_id") if isinstance(params, dict) else None
    named = next((headers[name] for name in SESSION_HEADERS if name in headers), member)
    return named if isinstance(named, str) and 0 < len(named) <= SESSION_LONGEST else None


def add_deadline(endpoint: str, raw: bytes, body: Mapping[str, Any], slo_ms: float) -> tuple[bytes, dict[str, Any]]:
    """Return ``raw`` and ``body`` with the deadline in their custom sampling parameters, where the prefill scheduler
    reads the deadline.

    A deadline that the body already carries stays. Raises BadRequest if the parameters are nested too deeply.
    """
    if endpoint == GENERATE:
        params = body.get("sampling_params")
        many = [_with_deadline(p, slo_ms) for p in (params if isinstance(params, list) else (params,))]
        member = {"sampling_params": many if isinstance(params, list) else many[0]}
    else:
        member = {"custom_params": _with_deadline(body, slo_ms)["custom_params"]}
    try:
        return splice(raw, body, _write_slowly(member)), {**body, **member}
    except ValueError as e:
        raise BadRequest(f"header {DEADLINE_HEADER}: the request's sampling parameters are {e}") from None


def _with_deadline(params: Any, slo_ms: float) -> Any:
    """Return ``params`` with the deadline. A value that is not an object stays: the servers will reject it."""
    params = {} if params is None else params
    if not isinstance(params, dict):
        return params
    custom = params.get("custom_params")
    if custom is None or isinstance(custom, dict):
        custom = {DEADLINE_FIELD: slo_ms, **(custom or {})}
    return {**params, "custom_params": custom}


def refuse(endpoint: str, body: Mapping[str, Any]) -> None:
    """Raise Rejection for more than PARTS_MAX prompts, for an empty text, OVERRIDES and misplaced fields (which crash
    stock servers), and for more than one sample per prompt (which would never be answered)."""
    if _parts(endpoint, body) > PARTS_MAX:
        what = "messages and parts" if endpoint == CHAT else "prompts"
        raise Rejection(refusal(413, "payload_too_large", f"there are more than {PARTS_MAX} {what}"))
    text, params = body.get("text"), body.get("sampling_params")
    if endpoint != GENERATE:
        text, params = None, {"n": body.get("n")}
    empty = text == "" or (isinstance(text, list) and "" in text)
    # A picture does not help: a model for text alone ignores it, and its decode server would end.
    if empty and not body.get("input_ids"):
        raise BadRequest("text: the prompt is empty")
    if body.get(OVERRIDES) is not None:
        raise BadRequest(NO_OVERRIDES)
    if endpoint == GENERATE and body.get(LABELS):
        raise BadRequest(f"{LABELS}: not through the router, which does not know the labels of the servers")
    if wrong := misplaced(body.get, batch=batch_size(endpoint, body) is not None):
        raise BadRequest(wrong)
    if any(map(several_samples, params if isinstance(params, list) else (params,))):
        raise BadRequest(ONE_SAMPLE)


def _parts(endpoint: str, body: Mapping[str, Any]) -> int:
    """Return the number of items to inspect one by one: messages and their parts, or prompts with their parameters.
    The number is exact only as far as the comparison with PARTS_MAX needs."""
    if endpoint == CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or len(messages) > PARTS_MAX:
            return len(messages) if isinstance(messages, list) else 0
        parts = (m.get("content") for m in messages if isinstance(m, dict))
        return sum(len(one) if isinstance(one, list) else 1 for one in parts)
    lists = (body.get(name) for name in ("text", "input_ids", "prompt", "sampling_params"))
    long = [one for one in lists if isinstance(one, list) and len(one) > PARTS_MAX]
    # One long prompt of token ids is inspected as a whole.
    return max((len(one) for one in long if set(map(type, one)) != {int}), default=batch_size(endpoint, body) or 0)
