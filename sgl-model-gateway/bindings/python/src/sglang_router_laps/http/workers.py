"""``/workers``: list, add and remove servers, with the fields of SGLang's Rust gateway."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Annotated, Any, NoReturn

import msgspec
import orjson
from laps_core import protocol
from laps_core.pools.instances import Instance, Role
from laps_core.pools.prefill import PrefillInstance
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..request.body import read_body, require_json
from ..request.replies import JSON, Rejection, Reply
from ..router import Router
from ..stock_flags import is_own, is_url
from .keys import allowed, has_keys, is_local

ROUTE = "/workers"
API = "workers API"
"""Source name of servers that this API has added."""


NO_KEY = "the router has no key: start it with --api-key or --control-plane-api-keys"


class Wanted(msgspec.Struct):
    """Fields read from the body of a POST; all other fields have no effect and are ignored."""

    url: str
    worker_type: Role
    bootstrap_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    api_key: str | None = None


class Workers:
    """Endpoints of the workers API."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.routes = [
            Route(ROUTE, self.each, methods=["GET", "POST"]),
            Route(f"{ROUTE}/{{id}}", self.one, methods=["GET", "DELETE"]),
        ]

    async def each(self, request: Request) -> Response:
        """List all servers (GET) or add a server (POST). Raises Rejection."""
        self._check(request)
        if request.method == "POST":
            return await self._add(request)
        workers = [self._describe(i) for i in self._router.instances]
        kinds = Counter(i.role for i in self._router.instances)
        stats = {"prefill_count": kinds["prefill"], "decode_count": kinds["decode"], "regular_count": 0}
        return _answer(200, {"workers": workers, "total": len(workers), "stats": stats})

    async def one(self, request: Request) -> Response:
        """Show a server (GET), or drain and remove the server (DELETE). Raises Rejection."""
        self._check(request)
        asked = request.path_params["id"]
        try:
            wanted = str(uuid.UUID(asked))
        except ValueError:
            _reject(400, "BAD_REQUEST", f"Invalid worker_id {asked!r} (expected UUID)")
        found = next((i.url for i in self._router.instances if id_of(i.url) == wanted), None)
        there = self._router.members.at(found) if found else None
        if there is None:
            _reject(404, "WORKER_NOT_FOUND", f"Worker {wanted} not found")
        if request.method == "GET":
            return _answer(200, self._describe(there))
        self._router.remove(there.url)
        message = "Worker finishes its requests and is then removed"
        return _answer(202, {"status": "accepted", "worker_id": wanted, "message": message})

    async def _add(self, request: Request) -> Response:
        raw = await read_body(request.scope, request.receive, self._router.args)
        require_json(request.scope)
        try:
            wanted = protocol.read(raw, Wanted)
        except ValueError as e:
            _reject(422, "INVALID_BODY", str(e))
        if not is_url(wanted.url):
            _reject(422, "INVALID_BODY", f"{wanted.url!r} is not the URL of a server")
        if is_own(wanted.url, self._router.args):
            _reject(422, "INVALID_BODY", f"{wanted.url!r} is this router itself")
        if wanted.api_key:
            _reject(422, "INVALID_BODY", "api_key: servers are called with the router's --api-key")
        port = wanted.bootstrap_port if wanted.worker_type == "prefill" else None
        try:
            there = self._router.add(wanted.worker_type, wanted.url, port, API)
        except ValueError as e:
            _reject(409, "CONFLICT", str(e))
        at = f"{ROUTE}/{id_of(there.url)}"
        message = "Worker gets requests once it has answered its health checks"
        accepted = {"status": "accepted", "worker_id": id_of(there.url), "url": there.url, "location": at}
        return _answer(202, {**accepted, "message": message}, {"location": at})

    def _describe(self, i: Instance) -> dict[str, Any]:
        members = self._router.members
        metadata = {"source": members.source[i]}
        if i in members.draining:
            metadata["draining"] = "true"
        told = {
            "id": id_of(i.url), "url": i.url, "model_id": "unknown", "priority": 50, "cost": 1.0,
            "worker_type": i.role, "is_healthy": i.healthy, "load": i.outstanding, "connection_mode": "HTTP",
            "disable_health_check": self._router.args.disable_health_check, "metadata": metadata,
        }  # fmt: skip
        if isinstance(i, PrefillInstance):
            metadata["pool"] = i.pool
            if i.bootstrap_port is not None:
                told["bootstrap_port"] = i.bootstrap_port
        return told

    def _check(self, request: Request) -> None:
        args, reads = self._router.args, request.method in ("GET", "HEAD")
        if not has_keys(args):
            if not (reads and is_local(args)):
                _reject(403, "FORBIDDEN", NO_KEY)
        elif not allowed(request, args):
            _reject(401, "UNAUTHORIZED", "a key is needed: authorization: Bearer KEY")


def id_of(url: str) -> str:
    """Return the id of the server at ``url``, which is the same at every router."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, url))


def _answer(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, JSON.decode())


def _reject(status: int, code: str, why: str) -> NoReturn:
    raise Rejection(Reply(status, JSON, orjson.dumps({"error": why, "code": code})))
