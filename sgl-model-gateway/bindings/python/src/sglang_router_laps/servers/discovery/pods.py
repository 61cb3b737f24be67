"""Servers that are pods of a Kubernetes cluster, found by label. Needs the extra ``kubernetes``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from kubernetes_asyncio import client, config, watch
from laps_core.pools.instances import Role
from yarl import URL

from . import Follow, Found

logger = logging.getLogger(__name__)

WATCH_S = 60
"""Duration of one watch; then all pods are listed again (seconds)."""
SLACK_S = 10.0
"""Time limit for listing pods, and grace time for the end of a watch before the connection counts as dead (seconds)."""
PAUSE_S = 1.0
"""Delay before pods are listed again (seconds)."""

FAULTS = config.ConfigException, client.ApiException, aiohttp.ClientError, OSError, msgspec.ValidationError
"""Failures to find the cluster or its pods."""


class Meta(msgspec.Struct):
    """Metadata of a pod."""

    uid: str
    annotations: dict[str, str] | None = None
    deletion: str | None = msgspec.field(name="deletionTimestamp", default=None)


class Condition(msgspec.Struct):
    """Condition of a pod."""

    type: str
    status: str


class Container(msgspec.Struct):
    """Container status of a pod."""

    restarts: int = msgspec.field(name="restartCount", default=0)


class Status(msgspec.Struct):
    """Status of a pod."""

    ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[Condition] | None = None
    containers: list[Container] | None = msgspec.field(name="containerStatuses", default=None)


class Pod(msgspec.Struct):
    """A pod, with the fields used here."""

    metadata: Meta
    status: Status

    def ready(self) -> bool:
        """Return True if the pod passes its readiness probe and is not being deleted."""
        conditions = self.status.conditions or ()
        return not self.metadata.deletion and any((c.type, c.status) == ("Ready", "True") for c in conditions)


@dataclass(slots=True)
class Pods:
    """Pods of one role, in one namespace or in all."""

    role: Role
    selector: Mapping[str, str]
    port: int
    namespace: str | None
    annotation: str
    """Annotation with the bootstrap port of a prefill pod."""
    _pods: dict[str, Pod] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return a name for the log."""
        return f"{self.role} pods"

    async def run(self, follow: Follow) -> None:
        """Watch the pods until cancelled; see Source."""
        failing = False
        while True:
            try:
                try:
                    config.load_incluster_config()
                except config.ConfigException:
                    await config.load_kube_config()
                async with client.ApiClient() as api:
                    await self._follow(api, follow)
                failing = False
            except FAULTS as e:
                if not failing:
                    # The exception's own text would include all headers and the body.
                    why = f"{e.status} {e.reason}" if isinstance(e, client.ApiException) else e
                    logger.warning("%s: %s; servers stay unchanged", self.name, why)
                failing = True
            await asyncio.sleep(PAUSE_S)

    async def _follow(self, api: client.ApiClient, follow: Follow) -> None:
        """List all pods, then follow changes for the duration of one watch."""
        core = client.CoreV1Api(api)
        labels = ",".join(f"{k}={v}" for k, v in self.selector.items())
        where: dict[str, Any] = {"label_selector": labels}
        listing: Callable[..., Awaitable[Any]] = core.list_pod_for_all_namespaces
        if self.namespace is not None:
            listing, where["namespace"] = core.list_namespaced_pod, self.namespace
        listed = api.sanitize_for_serialization(await listing(**where, _request_timeout=SLACK_S))
        self._pods = {pod.metadata.uid: pod for pod in msgspec.convert(listed["items"], list[Pod])}
        follow(self._found())
        where.update(resource_version=listed["metadata"]["resourceVersion"], timeout_seconds=WATCH_S)
        with contextlib.suppress(TimeoutError):
            async with watch.Watch("object").stream(listing, **where, _request_timeout=WATCH_S + SLACK_S) as events:
                async for event in events:
                    pod = msgspec.convert(event["raw_object"], Pod)
                    if event["type"] == "DELETED":
                        self._pods.pop(pod.metadata.uid, None)
                    else:
                        self._pods[pod.metadata.uid] = pod
                    follow(self._found())

    def _found(self) -> list[Found]:
        return [self._server(p, p.status.ip) for p in self._pods.values() if p.status.ip and p.ready()]

    def _server(self, pod: Pod, ip: str) -> Found:
        bootstrap = (pod.metadata.annotations or {}).get(self.annotation, "") if self.role == "prefill" else ""
        restarts = sum(c.restarts for c in pod.status.containers or ())
        return Found(
            self.role,
            str(URL.build(scheme="http", host=ip, port=self.port)),
            int(bootstrap) if bootstrap.isdecimal() else None,
            f"{pod.metadata.uid} {restarts}",
        )
