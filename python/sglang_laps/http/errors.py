"""Errors of LAPS's HTTP routes, in SGLang's format."""

from __future__ import annotations

import msgspec


def error(code: int, text: str) -> tuple[int, bytes]:
    """Return the status and the body (JSON) of an error response."""
    return code, msgspec.json.encode({"error": {"message": text, "code": code}})
