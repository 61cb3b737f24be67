"""Pods of a Kubernetes cluster as servers, with a fake API server that lists and watches pods."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from sglang_router_laps import membership

from .fake_hosts import hosts, loaded
from .fakes import FakePrefill, stack

kubernetes = pytest.importorskip("kubernetes_asyncio")

Pod = dict[str, Any]
NAMESPACE = "llm"


class Api:
    """Fake API with the pods of one namespace. ``oldest``: first version whose events are still known."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.version = 10
        self.oldest = 0
        self.refuse = False
        self.lists = self.watches = 0
        self._past: list[tuple[int, str, Pod]] = []
        self._news = asyncio.Event()
        self._cut = asyncio.Event()

    def set(self, name: str, role: str, ip: str, *, ready: bool = True, restarts: int = 0, **metadata: Any) -> None:
        """Create or change a pod."""
        kind = "MODIFIED" if name in self.pods else "ADDED"
        self.pods[name] = {
            "metadata": {
                "name": name, "uid": f"uid of {name}", "labels": {"app": role},
                "annotations": {"sglang.ai/bootstrap-port": "8997"}, **metadata,
            },
            "status": {
                "podIP": ip, "phase": "Running",
                "conditions": [{"type": "Ready", "status": str(ready)}],
                "containerStatuses": [
                    {"name": "c", "restartCount": restarts, "image": "", "imageID": "", "ready": ready},
                ],
            },
        }  # fmt: skip
        self._happened(kind, name)

    def delete(self, name: str) -> None:
        self._happened("DELETED", name)
        del self.pods[name]

    def forget(self) -> None:
        """Forget all events, so that a watch cannot resume from a version seen so far."""
        self.oldest = self.version + 1
        self.version += 2

    def close_watches(self) -> None:
        self._cut.set()
        self._cut = asyncio.Event()

    def _happened(self, kind: str, name: str) -> None:
        self.version += 1
        self.pods[name]["metadata"]["resourceVersion"] = str(self.version)
        self._past.append((self.version, kind, json.loads(json.dumps(self.pods[name]))))
        self._news.set()
        self._news = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.refuse:
            return web.json_response({"kind": "Status", "code": 403, "reason": "Forbidden"}, status=403)
        label = request.query["labelSelector"].removeprefix("app=")
        if request.query.get("watch") in ("True", "true", "1"):
            return await self._watch(request, label)
        self.lists += 1
        items = [p for p in self.pods.values() if p["metadata"]["labels"]["app"] == label]
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, label: str) -> web.StreamResponse:
        self.watches += 1
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        seen, cut = int(request.query["resourceVersion"]), self._cut
        while not cut.is_set():
            news = self._news
            if seen < self.oldest:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                break
            for version, kind, pod in self._past:
                if version > seen and pod["metadata"]["labels"]["app"] == label:
                    await response.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
            seen = self.version
            waits = [asyncio.create_task(e.wait()) for e in (news, cut)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for w in waits:
                w.cancel()
        return response


@contextlib.asynccontextmanager
async def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """Run an API server on loopback and write the cluster configuration for it."""
    from sglang_router_laps.servers.discovery import pods

    monkeypatch.setattr(membership, "LINGER_S", 0.1)
    monkeypatch.setattr(pods, "PAUSE_S", 0.05)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    api = Api()
    app = web.Application()
    app.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (folder / "config").write_text(json.dumps(config))
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(folder / "config"))
    try:
        yield api
    finally:
        api.close_watches()
        await runner.cleanup()


def test_servers_follow_kubernetes_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with hosts(5) as (prefills, decode):
            args = {
                "service_discovery": True, "service_discovery_namespace": NAMESPACE,
                "service_discovery_port": prefills[0].port,
                "prefill_selector": {"app": "prefill"}, "decode_selector": {"app": "decode"},
            }  # fmt: skip
            async with cluster(tmp_path, monkeypatch) as api, stack(0, 0, args=args) as s:

                def there(*servers: FakePrefill) -> bool:
                    return {i.url for i in s.lb.pools.instances if i.healthy} == {x.url for x in (always, *servers)}

                a, b, c, d, always = prefills
                assert (await s.post(text="a"))[0] == 503
                api.set("decode", "decode", decode.host)
                api.set("always", "prefill", always.host)
                api.set("a", "prefill", a.host)
                api.set("b", "prefill", b.host, ready=False)
                await s.until(lambda: there(a) and len(s.lb.decoders) == 1 and s.lb.decoders[0].healthy)
                assert s.lb.pools.instances[0].bootstrap_port == 8997
                async with loaded(s):
                    # One pod becomes ready; another is asked to end and is gone later.
                    api.set("b", "prefill", b.host)
                    await s.until(lambda: there(a, b))
                    api.set("a", "prefill", a.host, deletionTimestamp="2026-01-01T00:00:00Z")
                    await s.until(lambda: there(b) and s.lb.members.at(a.url) is None)
                    api.delete("a")
                    await a.stop()

                    # The pod gets another address.
                    api.set("b", "prefill", c.host)
                    await s.until(lambda: there(c))

                    # A watch that ends, a watch that resumes from too old a version, an API that refuses: the router
                    # misses no change and keeps its servers meanwhile.
                    watches = api.watches
                    api.close_watches()
                    await s.until(lambda: api.watches >= watches + 2)
                    api.set("d", "prefill", d.host)
                    await s.until(lambda: there(c, d))
                    lists = api.lists
                    api.refuse = True
                    api.close_watches()
                    await asyncio.sleep(0.3)
                    assert there(c, d)
                    api.delete("d")
                    api.forget()
                    api.refuse = False
                    await s.until(lambda: api.lists >= lists + 2 and there(c))
                    api.forget()
                    api.set("d", "prefill", d.host)
                    await s.until(lambda: there(c, d))

                    # The container has restarted at the same address.
                    probed = d.probed
                    api.set("d", "prefill", d.host, restarts=1)
                    await s.until(lambda: d.probed >= probed + 2 and there(c, d))

    asyncio.run(run())


def test_router_outside_cluster_says_so_once_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with hosts(1) as (prefills, decode), cluster(tmp_path, monkeypatch) as api:
            args = {
                "service_discovery": True, "service_discovery_namespace": NAMESPACE,
                "service_discovery_port": prefills[0].port,
                "prefill_selector": {"app": "prefill"}, "decode_selector": {"app": "decode"},
            }  # fmt: skip
            api.set("a", "prefill", prefills[0].host)
            api.set("decode", "decode", decode.host)
            (tmp_path / "config").rename(tmp_path / "away")
            async with stack(0, 0, args=args) as s:
                await s.until(lambda: all(f"{pods} pods: " in caplog.text for pods in ("prefill", "decode")))
                await asyncio.sleep(0.3)
                assert caplog.text.count("prefill pods: ") == caplog.text.count("decode pods: ") == 1
                assert "Traceback" not in caplog.text
                (tmp_path / "away").rename(tmp_path / "config")
                await s.until(lambda: len(s.lb.instances) == 2)

    asyncio.run(run())
