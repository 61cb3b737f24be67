"""A server without receipts returns none and serves like any other."""

from __future__ import annotations

import json

from laps_core.receipts.receipt import META_KEY
from served import NO_PREFIX_CACHE, Prefill, random_prompt, request_body, run_on

pytestmark = run_on(NO_PREFIX_CACHE)


def test_disabled_receipts_are_absent_from_all_routes(prefill: Prefill) -> None:
    status, text = prefill.post("/generate", request_body(5, random_prompt(1, 40)))
    assert status == 200
    assert META_KEY not in json.loads(text)["meta_info"]
    assert prefill.get("/laps_receipts") == {"receipts": [], "kept": 0}
    assert prefill.get("/laps_trace")["traceEvents"] == []
