"""Pool record of a real server: shared by its HTTP processes, protected by the key of SGLang's admin routes."""

from __future__ import annotations

import json
from typing import Any

import warm
from served import LAPS, NORMAL, NORMAL_LOOP, Prefill, Setup, run_on
from sglang_laps import compat

WORKERS = Setup("tokenizer-workers", (*LAPS, *NORMAL_LOOP, "--tokenizer-worker-num", "2"))
SERVED, CLEAN = run_on(NORMAL, *([WORKERS] if compat.release().takes_http_app else []))
ASKED = """
import json
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware
from sglang_laps.http.pool import PoolCell

PoolCell.make()
from sglang_laps.http.app import app as whole

found = []
cases = (0, 0, 0), ("a", 0, 0), ("a", 0, "a"), (0, "b", 0), ("a", "b", "a"), ("a", "b", "b")
for api_key, admin_api_key, given in cases:
    app = FastAPI(routes=[r for r in whole.routes if getattr(r, "path", "") == "/laps_pool"])
    add_api_key_middleware(app, api_key=api_key or None, admin_api_key=admin_api_key or None)
    headers = {"Authorization": f"Bearer {given}"} if given else {}
    found.append(TestClient(app).post("/laps_pool", content=b"{}", headers=headers).status_code)
print(json.dumps(found))
"""
"""Script that sends an invalid change, answered with 400 if the key is right. Runs in a new process, because its import
hooks into SGLang."""


def change(prefill: Prefill, assignment: str, if_version: int) -> tuple[int, Any]:
    status, said = prefill.post("/laps_pool", {"assignment": assignment, "if_version": if_version})
    return status, json.loads(said)


@SERVED
@CLEAN
def test_all_http_processes_share_pool_record(prefill: Prefill) -> None:
    n = prefill.get("/laps_status")["pool"]["version"]
    for i in range(10):
        made = {"assignment": "short" if i % 2 else "long", "version": n + i + 1}
        assert change(prefill, str(made["assignment"]), n + i) == (200, made)
        assert change(prefill, "both", n + i) == (409, made)
        assert prefill.get("/laps_status")["pool"] == made
    assert prefill.post("/laps_pool", {"assignment": "middle", "if_version": n + 10})[0] == 400


def test_pool_route_follows_sglang_admin_key_rules() -> None:
    done = warm.SGLANG.run("-c", ASKED)
    assert json.loads(done.stdout.splitlines()[-1]) == [400, 401, 400, 401, 401, 400], done.stderr[-2000:]
