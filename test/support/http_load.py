"""Requests through aiohttp, as an ordinary client sends them: a streamed answer, or one prefill."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmark.load.prompts import without_decode_server

REQUEST_LIMIT_S = 400.0
"""Time limit of one request, against hangs (seconds)."""


@dataclass(slots=True)
class RequestRecord:
    """One request as seen by its client. Times in seconds; `at` counts from the start of the load."""

    kind: str
    at: float
    ttft_s: float | None
    total_s: float
    text: str = ""
    error: str | None = None
    prompt_tokens: int = 0


def session() -> aiohttp.ClientSession:
    """Return a client session without a limit on connections; each request has a time limit."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    )


async def stream(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    kind: str,
    epoch: float,
    headers: dict[str, str] | None = None,
) -> RequestRecord:
    """Post `body` to an OpenAI-compatible route with streaming on; the first piece of text is the first token."""
    begin = time.perf_counter()
    record = RequestRecord(kind, begin - epoch, None, 0.0)
    pieces = []
    try:
        async with http.post(url, json={**body, "stream": True}, headers=headers) as reply:
            if reply.status != 200:
                record.error = f"HTTP {reply.status}: {(await reply.text())[:200]}"
            else:
                async for line in reply.content:
                    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        record.error = str(event["error"])[:200]
                        break
                    for choice in event.get("choices", ()):
                        if (
                            (choice.get("delta") or {}).get("content")
                            or choice.get("text")
                            or choice.get("finish_reason")
                        ):
                            if record.ttft_s is None:
                                record.ttft_s = time.perf_counter() - begin
                            pieces.append((choice.get("delta") or {}).get("content") or choice.get("text") or "")
    except (aiohttp.ClientError, TimeoutError, ValueError) as e:
        record.error = f"{type(e).__name__}: {e}"[:200]
    record.text, record.total_s = "".join(pieces), time.perf_counter() - begin
    if record.ttft_s is None and record.error is None:
        record.error = "the stream ended without a token"
    return record


async def prefill_only(
    http: aiohttp.ClientSession,
    base_url: str,
    input_ids: Sequence[int],
    kind: str,
    epoch: float,
    custom_params: dict[str, Any] | None = None,
) -> RequestRecord:
    """Prefill `input_ids` on a prefill server alone, through SGLang's fake bootstrap host, to the first token."""
    params: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0}
    if custom_params:
        params["custom_params"] = custom_params
    body = {
        "input_ids": list(input_ids),
        "sampling_params": params,
        **without_decode_server(random.getrandbits(62)),
    }
    begin = time.perf_counter()
    record = RequestRecord(kind, begin - epoch, None, 0.0)
    try:
        async with http.post(base_url + "/generate", json=body) as reply:
            answer = await reply.json()
            if reply.status == 200:
                record.ttft_s = time.perf_counter() - begin
                record.prompt_tokens = answer["meta_info"]["prompt_tokens"]
            else:
                record.error = f"HTTP {reply.status}: {str(answer)[:200]}"
    except (aiohttp.ClientError, TimeoutError, ValueError) as e:
        record.error = f"{type(e).__name__}: {e}"[:200]
    record.total_s = time.perf_counter() - begin
    return record
