"""Score prefill servers by their quotes: an example of a router that uses POST /laps_quote.

    python examples/scorer/scorer.py 1200 http://prefill-0:30000=30000 http://prefill-1:30000=0

Arguments: the prompt's tokens, then for each server its address and the prompt tokens in its prefix cache. The best
server has score 1, a server that would take twice as long 0.5. A server without an answer has none. Needs only Python.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAX_AGE_S = 0.1
"""Accepted age of the state behind a quote (seconds); clients that accept it share one query of the scheduler."""
TIMEOUT_S = 0.25


def quotes(server: str, requests: list[dict[str, int]]) -> list[dict[str, Any]] | None:
    """Return a server's quote for each request, ``{"new": tokens, "cached": tokens}``; None if it gives no quote."""
    key = os.environ.get("LAPS_API_KEY")
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    url = f"{server.rstrip('/')}/laps_quote?max_age_s={MAX_AGE_S}"
    try:
        asked = urllib.request.Request(url, json.dumps(requests).encode(), headers)
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as reply:
            found: list[dict[str, Any]] = json.load(reply)["quotes"]
    except (OSError, ValueError, KeyError):
        # No answer in time, LAPS is off, or its step times are not known yet.
        return None
    return found


def scores(tokens: int, cached: Mapping[str, int]) -> dict[str, float]:
    """Return the score of each server for a prompt of ``tokens`` tokens. ``cached``: those in each server's cache."""

    def ttft_ms(server: str) -> float | None:
        old = min(cached[server], tokens - 1)
        found = quotes(server, [{"new": tokens - old, "cached": old}])
        return None if found is None else float(found[0]["ttft_ms"])

    with ThreadPoolExecutor(max(1, len(cached))) as pool:
        known = {s: ms for s, ms in zip(cached, pool.map(ttft_ms, cached), strict=True) if ms is not None}
    best = min(known.values(), default=0.0)
    return {server: best / ms if ms > 0.0 else 1.0 for server, ms in known.items()}


def main() -> int:
    """Print the scores, the best server first."""
    tokens, *servers = sys.argv[1:]
    cached = {url: int(count or 0) for url, _, count in (server.partition("=") for server in servers)}
    for server, score in sorted(scores(int(tokens), cached).items(), key=lambda item: -item[1]):
        print(f"{score:.3f}  {server}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
