"""Errors of LAPS's routes, in the form of SGLang's."""

from __future__ import annotations

import msgspec


def error(code: int, text: str) -> tuple[int, bytes]:
    """Return the status and the body (JSON) of an answer that is an error."""
    return code, msgspec.json.encode({"error": {"message": text, "code": code}})
