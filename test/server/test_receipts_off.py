"""A server without receipts returns none and serves like any other."""

from __future__ import annotations

import json

from laps_core.receipts.receipt import META_KEY
from served import NO_PREFIX_CACHE, Prefill, ask, ids, on

pytestmark = on(NO_PREFIX_CACHE)


def test_there_is_nothing_where_nothing_is_kept(prefill: Prefill) -> None:
    status, text = prefill.post("/generate", ask(5, ids(1, 40)))
    assert status == 200
    assert META_KEY not in json.loads(text)["meta_info"]
    assert prefill.get("/laps_receipts") == {"receipts": [], "kept": 0}
    assert prefill.get("/laps_trace")["traceEvents"] == []
