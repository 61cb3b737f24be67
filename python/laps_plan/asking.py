"""Requests to a running server or router."""

from __future__ import annotations

import os
from urllib.request import Request

KEY = "LAPS_API_KEY"
"""The environment variable that holds a server's or router's key."""


def request_to(url: str, route: str) -> Request:
    """Return a request for ``route`` of the server or router at ``url``, with the key from the environment variable KEY
    if it is set. Raises ValueError (one line) if ``url`` is not an http(s) URL."""
    whole = f"{url.rstrip('/')}/{route}"
    if not whole.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not an http(s) URL")
    key = os.environ.get(KEY)
    return Request(whole, headers={"Authorization": f"Bearer {key}"} if key else {})
