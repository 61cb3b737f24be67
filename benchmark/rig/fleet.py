"""Servers of a comparison: all run and only the loaded one is awake, or they run one at a time if memory is short."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laps_plan.traffic.job import Job

from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.rig import servers
from benchmark.rig.devices import Device, free_gib
from benchmark.rig.variants import Variant

WARM = 64
"""Warm-up requests of many lengths, sent to each server after its start."""


@dataclass
class Fleet:
    """Servers of the variants. Context manager: on exit every server is stopped."""

    device: Device
    variants: Sequence[Variant]
    prompts: Prompts
    out: Path
    say: Callable[[str], None]
    pd: bool = False
    """True for a router in front of each prefill server, and one decode server behind all of them."""
    together: bool | None = None
    """True if all servers run at the same time; None: if memory suffices."""
    _up: dict[str, tuple[Target, Target]] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _decode: servers.Server | None = None
    _model: Path | None = None

    def __enter__(self) -> Fleet:
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            self._model = self.device.checkpoint()
            if self.pd:
                chunk = ("--chunked-prefill-size", str(self.device.chunk))
                decode = servers.decode(self._model, self.log("decode"), *chunk, *self.device.args, env=self.device.env)
                self.say("starting the decode server")
                self._decode = stack.enter_context(decode).ready(self.device.start_s)
            if self.together is None:
                self.together = len(self.variants) * self.device.server_gib < free_gib(self.device)
                if not self.together:
                    self.say("not enough memory for all servers: running one at a time")
            if self.together:
                launched = [self._launch(v) if self.device.at_once else None for v in self.variants]
                for variant, server in zip(self.variants, launched, strict=True):
                    self._start(variant, server)
            self._outer = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._outer.close()

    def target(self, name: str) -> Target:
        """Return the address for this variant's load; starts its server, and stops another if they run one at a
        time."""
        if name not in self._up:
            self._stop()
            self._start(next(v for v in self.variants if v.name == name))
        return self._up[name][0]

    def prefill(self, name: str) -> Target:
        """Return the variant's prefill server, which must be running."""
        return self._up[name][1]

    def log(self, name: str) -> Path:
        return servers.log_of(self.out, name)

    def _stop(self) -> None:
        self._up.clear()
        self._stack.close()

    def _launch(self, variant: Variant) -> servers.Server:
        assert self._model
        self.say(f"starting {variant.name}")
        args = ("--chunked-prefill-size", str(self.device.chunk), *self.device.args_of(variant))
        log = self.log(variant.name)
        env, sleeps = self.device.env_of(variant), self.device.sleeps
        prefill = servers.prefill(self._model, log, *args, env=env, name=variant.name, sleeps=sleeps)
        return self._stack.enter_context(prefill)

    def _start(self, variant: Variant, launched: servers.Server | None = None) -> None:
        prefill = launched or self._launch(variant)
        prefill.ready(self.device.start_s)
        front = prefill
        if self._decode:
            log, name = self.log(f"router-{variant.name}"), f"router ({variant.name})"
            front = servers.minilb([prefill], [self._decode], log, name=name)
            self._stack.enter_context(front).ready()
        self._up[variant.name] = Target(servers.HOST, front.port), Target(servers.HOST, prefill.port)
        warm_up(self._up[variant.name][0], self.prompts, self.device.longest)


def warm_up(target: Target, prompts: Prompts, longest: int) -> None:
    """Send prompts of 1 to 4,096 tokens (at most half of ``longest``), alone and in batches, so that measurements
    include no first-time work."""
    rng = random.Random(0)
    jobs = [Job(0.0, min(longest // 2, round(2 ** rng.uniform(0, 12)))) for _ in range(WARM)]
    bodies = prompts.bodies(jobs, seed=0)
    asyncio.run(client.one_by_one(target, bodies[:8]))
    asyncio.run(client.closed(target, bodies[8:], 8, 1.5))


def get_json(target: Target, path: str) -> dict[str, Any] | None:
    """Return a route's JSON answer, or None if the request fails."""
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(target.url + path, timeout=30) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer
    return None


def busy_s(target: Target) -> float | None:
    """Return the device seconds that a prefill server has spent on both classes; None if unknown."""
    status = get_json(target, "/laps_status")
    if not status or not status.get("enabled"):
        return None
    return sum(float(of["busy_s"]) for of in status["totals"].values())


def flush(target: Target) -> None:
    """Empty the prefix cache."""
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(target.url + "/flush_cache", method="POST"), timeout=30).close()
