"""Requests as they go over the wire, from jobs: every variant is sent the same bytes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmark.rig import fast
from benchmark.rig.servers import FAKE_BOOTSTRAP_HOST
from benchmark.serving.job import Job


@dataclass
class Prompts:
    """Token ids for jobs, reproducible from ``seed``."""

    vocabulary: tuple[int, int]
    seed: int
    longest: int
    """Length (tokens) of the streams that histories are the beginnings of."""
    reuse: bool
    """Whether the cached part is sent too. Requests through the fake bootstrap host never enter the prefix cache, so
    there the new tokens stand alone."""
    prefill_only: bool
    _streams: dict[int, Any] = field(default_factory=dict)

    def stream(self, number: int) -> Any:
        """The tokens all histories of this stream begin with."""
        if number not in self._streams:
            rng = np.random.default_rng([self.seed, 1, number])
            self._streams[number] = rng.integers(*self.vocabulary, size=self.longest)
        return self._streams[number]

    def ids(self, job: Job, rng: Any) -> list[int]:
        """Its prompt."""
        if self.reuse and job.goes_on:
            return self.stream(job.stream)[: job.cached + job.new].tolist()  # type: ignore[no-any-return]
        own = rng.integers(*self.vocabulary, size=job.new)
        history = self.stream(job.stream)[: job.cached] if self.reuse else own[:0]
        return np.concatenate([history, own]).tolist()  # type: ignore[no-any-return]

    def bodies(self, jobs: Iterable[Job], seed: int) -> list[bytes]:
        """A whole POST for each."""
        rng, rooms = np.random.default_rng([self.seed, 2, seed]), random.Random(seed)
        return [self._post(self.ids(job, rng), rooms) for job in jobs]

    def whole_stream(self, number: int, tokens: int) -> bytes:
        """A POST whose prompt is a stream's beginning: what puts it into the prefix cache."""
        return self._post(self.stream(number)[:tokens].tolist(), random.Random(number))

    def _post(self, ids: list[int], rooms: random.Random) -> bytes:
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        }
        if self.prefill_only:
            body |= {
                "bootstrap_host": FAKE_BOOTSTRAP_HOST,
                "bootstrap_port": 1,
                "bootstrap_room": rooms.getrandbits(60),
            }
        return fast.request(body)
