"""``/workers``: fields and statuses like those of SGLang's Rust gateway, and access rights."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import pytest
from sglang_router.router_args import RouterArgs

from .fakes import LONG, FakePrefill, Stack, stack

Body = dict[str, Any]
ADMIN, USER = ("1", "name", "admins", "admin"), ("2", "name", "users", "user")
KEYED = {"api_key": "sesame"}
OWN = f"http://127.0.0.1:{RouterArgs().port}"
"""URL of the router by its flags: the tests serve it at another port."""
FIELDS = {
    "id", "url", "model_id", "priority", "cost", "worker_type", "is_healthy", "load", "connection_mode",
    "disable_health_check", "metadata",
}  # fmt: skip


async def ask(
    s: Stack, method: str, path: str = "", body: object = None, key: str | None = "the router's"
) -> tuple[int, Body, str]:
    key = s.lb.args.api_key if key == "the router's" else key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    if data is not None:
        headers["content-type"] = "application/json"
    async with s.client.request(method, f"{s.url}/workers{path}", data=data, headers=headers) as r:
        return r.status, await r.json(), r.headers.get("location", "")


def test_workers_are_listed_added_and_deleted() -> None:
    async def run() -> None:
        async with stack(2, 1, args=KEYED) as s:
            status, listed, _ = await ask(s, "GET")
            assert (status, listed["total"]) == (200, 3)
            assert listed["stats"] == {"prefill_count": 2, "decode_count": 1, "regular_count": 0}
            prefill, decode = listed["workers"][0], listed["workers"][2]
            assert prefill.keys() == FIELDS | {"bootstrap_port"}
            assert decode.keys() == FIELDS
            assert (prefill["worker_type"], prefill["bootstrap_port"], prefill["url"]) == (
                "prefill", 8998, s.prefills[0].url,
            )  # fmt: skip
            assert prefill["metadata"] == {"source": "flags", "pool": "short"}

            new = FakePrefill(s.decodes[0].world)
            await new.start()
            wanted = {"url": new.url, "worker_type": "prefill", "bootstrap_port": 8997, "priority": 60, "labels": {}}
            status, accepted, at = await ask(s, "POST", body=wanted)
            assert (status, accepted["status"], accepted["url"]) == (202, "accepted", new.url)
            assert at == accepted["location"] == f"/workers/{accepted['worker_id']}"
            # Adding the same server again changes nothing.
            assert (await ask(s, "POST", body=wanted))[:2] == (202, accepted)
            await s.until(lambda: s.lb.pools.by_url(new.url).healthy)
            found = (await ask(s, "GET", f"/{accepted['worker_id']}"))[1]
            assert (found["url"], found["bootstrap_port"], found["load"]) == (new.url, 8997, 0)
            assert found["metadata"]["source"] == "workers API"

            new.gate.clear()
            held = [asyncio.create_task(s.post(text=f"{n}{LONG}")) for n in range(12)]
            await s.until(lambda: new.running > 0)
            status, accepted, _ = await ask(s, "DELETE", f"/{found['id']}")
            assert (status, accepted["worker_id"]) == (202, found["id"])
            assert (await ask(s, "GET", f"/{found['id']}"))[1]["metadata"]["draining"] == "true"
            assert (await ask(s, "DELETE", f"/{found['id']}"))[0] == 202
            new.gate.set()
            assert {status for status, _ in await asyncio.gather(*held)} == {200}
            await s.until(lambda: s.lb.members.at(new.url) is None)
            assert (await ask(s, "GET", f"/{found['id']}"))[0] == 404
            await new.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"worker_type": "prefill"}, 422, "missing required field `url`"),
        ({"url": "http://a:1"}, 422, "missing required field `worker_type`"),
        ({"url": "http://a:1", "worker_type": "regular"}, 422, "Invalid enum value 'regular'"),
        ({"url": "a:1", "worker_type": "decode"}, 422, "'a:1' is not the URL of a server"),
        ({"url": OWN, "worker_type": "prefill"}, 422, "is this router itself"),
        ({"url": "http://a:1", "worker_type": "prefill", "bootstrap_port": 0}, 422, "$.bootstrap_port"),
        ({"url": "http://a:1", "worker_type": "decode", "api_key": "k"}, 422, "--api-key"),
        ([], 422, "Expected `object`"),
        (b'{"x":' + b"[" * 2000 + b"]" * 2000 + b"}", 422, "maximum recursion depth"),
    ],
)
def test_invalid_worker_is_refused(body: object, status: int, says: str) -> None:
    async def run() -> None:
        async with stack(2, 1, args=KEYED) as s:
            found, reply, _ = await ask(s, "POST", body=body)
            assert found == status
            assert says in reply["error"]
            assert len(s.lb.instances) == 3

    asyncio.run(run())


def test_role_conflict_and_invalid_or_unknown_ids_are_refused() -> None:
    async def run() -> None:
        async with stack(2, 1, args=KEYED) as s:
            status, reply, _ = await ask(s, "POST", body={"url": s.prefills[0].url, "worker_type": "decode"})
            assert (status, reply["code"]) == (409, "CONFLICT")
            assert (await ask(s, "GET", "/abc"))[0] == 400
            for method in ("GET", "DELETE"):
                status, reply, _ = await ask(s, method, f"/{uuid.UUID(int=0)}")
                assert (status, reply["code"]) == (404, "WORKER_NOT_FOUND")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("args", "good", "bad"),
    [
        ({"api_key": "sesame"}, ["sesame"], ["other", None]),
        ({"api_key": "sesame", "control_plane_api_keys": [ADMIN, USER]}, ["admins"], ["sesame", "users", None]),
        ({"control_plane_api_keys": [USER]}, [], ["users", None]),
    ],
)  # fmt: skip
def test_workers_api_requires_valid_key(args: Body, good: list[str | None], bad: list[str | None]) -> None:
    async def run() -> None:
        async with stack(2, 1, args=args) as s:
            for key in good:
                assert (await ask(s, "GET", key=key))[0] == 200
            for key in bad:
                for method, path in (("GET", ""), ("POST", ""), ("GET", "/x"), ("DELETE", "/x")):
                    assert (await ask(s, method, path, key=key))[0] == 401

    asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "reads"),
    [("127.0.0.1", 200), ("::1", 200), ("localhost", 200), ("0.0.0.0", 403), ("::", 403), ("10.1.2.3", 403)],
)
def test_keyless_workers_api_is_read_only_and_loopback_only(host: str, reads: int) -> None:
    async def run() -> None:
        async with stack(2, 1, args={"host": host}) as s:
            for key in (None, "any"):
                assert (await ask(s, "GET", key=key))[0] == reads
                wanted = {"url": "http://a.stranger:1", "worker_type": "prefill"}
                status, reply, _ = await ask(s, "POST", body=wanted, key=key)
                assert (status, "--api-key" in reply["error"]) == (403, True)
                assert (await ask(s, "DELETE", "/x", key=key))[0] == 403
            assert len(s.lb.instances) == 3

    asyncio.run(run())
