"""Errors inside a reply whose status line said that all is well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

UNKNOWN = 500


def fault(reply: bytes) -> tuple[int, bytes] | None:
    """(status, ``{"error": ...}``) of the first error in a whole reply or in a stream's events; None without one."""
    # Nearly every reply is done with here; text that holds these words costs a parse and no more.
    if b'"error"' not in reply and b'"abort"' not in reply:
        return None
    for payload in _payloads(reply):
        for item in payload if isinstance(payload, list) else (payload,):
            found = _error(item) if isinstance(item, dict) else None
            if found is not None:
                return found
    return None


def _payloads(reply: bytes) -> Iterator[Any]:
    for event in reply.split(b"\n\n") if reply.startswith(b"data:") else (reply,):
        try:
            yield orjson.loads(event.removeprefix(b"data:"))
        except orjson.JSONDecodeError:
            continue


def _error(item: dict[str, Any]) -> tuple[int, bytes] | None:
    error = item.get("error")
    if error:
        code = error.get("code") if isinstance(error, dict) else None
        return _status(code), orjson.dumps({"error": error})
    meta = item.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        status = _status(reason.get("status_code"))
        message = reason.get("message") or "aborted by the prefill server"
        return status, orjson.dumps({"error": {"message": message, "type": "abort", "code": status}})
    choices = item.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            return UNKNOWN, orjson.dumps(
                {"error": {"message": "aborted by the prefill server", "type": "abort", "code": UNKNOWN}}
            )
    return None


def _status(code: Any) -> int:
    known = isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599
    return code if known else UNKNOWN
