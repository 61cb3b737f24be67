"""Requests to a running server or router."""

from __future__ import annotations

import os
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

KEY = "LAPS_API_KEY"
"""The environment variable that holds a server's or router's key."""


class _NoRedirect(HTTPRedirectHandler):
    """Handler that treats redirects as errors, because the key is only for the named server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return None, so that no other request is sent."""


def get(url: str, route: str, timeout_s: float) -> bytes:
    """Return the answer of ``route`` of the server or router at ``url``, requested with the key from the environment
    variable KEY if it is set. Raises ValueError (one line)."""
    whole = f"{url.rstrip('/')}/{route}"
    if not whole.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not an http(s) URL")
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with build_opener(_NoRedirect).open(Request(whole, headers=headers), timeout=timeout_s) as reply:
            body: bytes = reply.read()
    except HTTPError as e:
        raise ValueError(f"{whole}: {e.code}, {e.reason}") from None
    except (OSError, HTTPException, ValueError) as e:
        raise ValueError(f"{whole}: {' '.join(str(e).split())}") from None
    return body
