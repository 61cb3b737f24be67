"""Requests in wire format, from jobs: every variant gets the same bytes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from laps_plan.traffic.job import Job

from benchmark.load.connection import request
from benchmark.rig.servers import FAKE_BOOTSTRAP_HOST


@dataclass
class Prompts:
    """Token ids for jobs, reproducible from ``seed``."""

    vocabulary: tuple[int, int]
    seed: int
    longest: int
    """Length (tokens) of the streams whose beginnings are the histories."""
    reuse: bool = False
    """True if the cached part is sent, too. Requests through the fake bootstrap host never enter the prefix cache, so
    there the new tokens stand alone."""
    prefill_only: bool = True
    """True without a decode server."""
    answer: int = 1
    """Tokens asked for; more than one are streamed."""
    systems: int = 1
    """System prompts, each shared by some of the streams, which begin with it."""
    system_tokens: int = 0
    """Length of a system prompt (tokens)."""
    _streams: dict[int, Any] = field(default_factory=dict)

    def stream(self, number: int) -> Any:
        """Return the tokens that all histories of this stream begin with."""
        if number not in self._streams:
            system = np.random.default_rng([self.seed, 4, number % self.systems])
            own = np.random.default_rng([self.seed, 1, number])
            parts = ((system, self.system_tokens), (own, self.longest - self.system_tokens))
            drawn = [rng.integers(*self.vocabulary, size=tokens) for rng, tokens in parts]
            self._streams[number] = np.concatenate(drawn)
        return self._streams[number]

    def ids(self, job: Job, rng: Any) -> list[int]:
        """Return the prompt of ``job``."""
        if self.reuse and job.goes_on:
            return self.stream(job.stream)[: job.cached + job.new].tolist()  # type: ignore[no-any-return]
        own = rng.integers(*self.vocabulary, size=job.new)
        history = self.stream(job.stream)[: job.cached] if self.reuse else own[:0]
        return np.concatenate([history, own]).tolist()  # type: ignore[no-any-return]

    def bodies(self, jobs: Iterable[Job], seed: int, key: tuple[str, str] | None = None) -> list[bytes]:
        """Return a whole POST for each job. ``key``: a header with the job's stream, and how its value begins."""
        rng, rooms = np.random.default_rng([self.seed, 2, seed]), random.Random(seed)
        return [
            self._post(self.ids(job, rng), rooms, job.slo_s, headers={key[0]: f"{key[1]}{job.stream}"} if key else {})
            for job in jobs
        ]

    def whole_stream(self, number: int, tokens: int) -> bytes:
        """Return a POST with the beginning of a stream, which puts it into the prefix cache."""
        return self._post(self.stream(number)[:tokens].tolist(), random.Random(number))

    def histories(self, jobs: Iterable[Job]) -> list[bytes]:
        """Return a POST for each history that is older than the load. ``jobs``: in order of their times."""
        tokens: dict[int, int] = {}
        for job in jobs if self.reuse else ():
            # What a conversation adds is sent with its turns: only what came before its first one is older.
            known = tokens.get(job.stream, job.cached)
            tokens[job.stream] = known if job.goes_on else max(known, job.cached)
        return [self.whole_stream(stream, n) for stream, n in tokens.items() if n]

    def _post(
        self,
        ids: list[int],
        rooms: random.Random,
        slo_s: float | None = None,
        custom: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        params: dict[str, Any] = {"max_new_tokens": self.answer, "temperature": 0, "ignore_eos": True}
        own = {**(custom or {}), **({} if slo_s is None else {"ttft_slo_ms": 1e3 * slo_s})}
        if own:
            params["custom_params"] = own
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": params}
        if self.answer > 1:
            body["stream"] = True
        if self.prefill_only:
            body |= {
                "bootstrap_host": FAKE_BOOTSTRAP_HOST,
                "bootstrap_port": 1,
                "bootstrap_room": rooms.getrandbits(60),
            }
        return request(body, headers=headers)
