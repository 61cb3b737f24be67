"""Routes of LAPS in SGLang's HTTP application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Response
from sglang.srt.utils.auth import AuthLevel, auth_level

Handler = TypeVar("Handler", bound=Callable[..., Any])


def serve(app: FastAPI, route: str, *methods: str, **how: Any) -> Callable[[Handler], Handler]:
    """Return a decorator: a function serves this route, for these methods (none: GET), to clients that have the key of
    SGLang's admin routes. `how`: further arguments of ``FastAPI.api_route``."""

    def add(handler: Handler) -> Handler:
        app.api_route(f"/{route}", methods=[*methods] or ["GET"], **how)(auth_level(AuthLevel.ADMIN_OPTIONAL)(handler))
        return handler

    return add


def reply(answer: tuple[int, bytes]) -> Response:
    """Return the response with this status and body (JSON)."""
    status, body = answer
    return Response(body, status, media_type="application/json")
