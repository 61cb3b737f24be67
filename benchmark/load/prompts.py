"""Requests in wire format, made from jobs: every variant gets the same bytes. Prompts of a session grow from turn to
turn, and each turn goes to the rank that has its history."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from laps_plan.sim.group import Assign
from laps_plan.sim.request import Request
from laps_plan.traffic.job import Job

from benchmark.load.connection import request

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""SGLang's own constant: a prefill server answers requests with this host without any decode server."""


def without_decode_server(bootstrap_room: int) -> dict[str, Any]:
    """Return the fields of a request that a prefill server answers alone."""
    return {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_port": 1, "bootstrap_room": bootstrap_room}


@dataclass
class Prompts:
    """Token ids for jobs, reproducible from ``seed``."""

    vocabulary: tuple[int, int]
    seed: int
    longest: int
    """Length (tokens) of the streams. A history is the start of a stream."""
    reuse: bool = False
    """True if the cached part of a prompt is also sent. Requests through the fake bootstrap host never enter the prefix
    cache, so only their new tokens are sent."""
    prefill_only: bool = True
    """True if there is no decode server."""
    answer: int = 1
    """Tokens to generate; more than one are streamed."""
    systems: int = 1
    """Number of system prompts. Each is the start of some of the streams."""
    system_tokens: int = 0
    """Length of a system prompt (tokens)."""
    _streams: dict[int, Any] = field(default_factory=dict)

    def stream(self, number: int) -> Any:
        """Return the tokens of this stream; every history is a prefix of them."""
        if number not in self._streams:
            system = np.random.default_rng([self.seed, 4, number % self.systems])
            own = np.random.default_rng([self.seed, 1, number])
            parts = ((system, self.system_tokens), (own, self.longest - self.system_tokens))
            drawn = [rng.integers(*self.vocabulary, size=tokens) for rng, tokens in parts]
            self._streams[number] = np.concatenate(drawn)
        return self._streams[number]

    def ids(self, job: Job, rng: Any) -> list[int]:
        if self.reuse and job.continues_stream:
            return self.stream(job.stream)[: job.cached + job.new].tolist()  # type: ignore[no-any-return]
        own = rng.integers(*self.vocabulary, size=job.new)
        history = self.stream(job.stream)[: job.cached] if self.reuse else own[:0]
        return np.concatenate([history, own]).tolist()  # type: ignore[no-any-return]

    def bodies(self, jobs: Iterable[Job], seed: int, key: tuple[str, str] | None = None) -> list[bytes]:
        """Return a whole POST for each job. ``key``: name of a header, and the prefix of the stream number in it."""
        rng, rooms = np.random.default_rng([self.seed, 2, seed]), random.Random(seed)
        return [
            self._post(self.ids(job, rng), rooms, job.slo_s, headers={key[0]: f"{key[1]}{job.stream}"} if key else {})
            for job in jobs
        ]

    def whole_stream(self, number: int, tokens: int) -> bytes:
        """Return a POST that puts the first ``tokens`` tokens of a stream into the prefix cache."""
        return self._post(self.stream(number)[:tokens].tolist(), random.Random(number))

    def histories(self, jobs: Iterable[Job]) -> list[bytes]:
        """Return a POST for each history that is older than the load. ``jobs``: in order of their times."""
        tokens: dict[int, int] = {}
        for job in jobs if self.reuse else ():
            # A conversation's turns send what they add, so only the history of the first turn is older.
            known = tokens.get(job.stream, job.cached)
            tokens[job.stream] = known if job.continues_stream else max(known, job.cached)
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
            body |= without_decode_server(rooms.getrandbits(60))
        return request(body, headers=headers)


HELD = "held_tokens"
"""Custom parameter of a request: number of its prompt's tokens that the server puts into the prefix cache on arrival
(``benchmark/rig/prefixes/kept_prefixes.py``)."""


@dataclass
class SessionPrompts(Prompts):
    """Token ids of sessions: a turn starts with the first ``cached`` tokens of an earlier turn, and its new tokens
    occur nowhere else. So a server that keeps all prompts has exactly ``cached`` tokens of the turn."""

    def paths(self, jobs: Iterable[Job], seed: int) -> list[Any]:
        """Return the prompt of each job, an array of token ids. A history that no earlier turn has is random."""
        rng = np.random.default_rng([self.seed, 3, seed])
        earlier: dict[int, list[Any]] = {}
        found = []
        for job in jobs:
            # Continue the last or the longest turn: a sub-agent starts from an earlier point and replaces no history.
            turns = earlier.setdefault(job.stream, [])
            base = next((p for p in turns if len(p) >= job.cached), turns[-1] if turns else self._new(rng, 0))
            history = base[: job.cached]
            own = self._new(rng, job.cached - len(history) + job.new)
            prompt = np.concatenate([history, own])
            longest = max([prompt, *turns], key=len)
            earlier[job.stream] = [prompt, longest]
            found.append(prompt)
        return found

    def bodies(self, jobs: Iterable[Job], seed: int, key: tuple[str, str] | None = None) -> list[bytes]:
        """Return a whole POST for each job. The first request of a session makes the server hold its history."""
        rooms, jobs = random.Random(seed), list(jobs)
        return [
            self._post(path.tolist(), rooms, job.slo_s, {HELD: job.cached} if job.cached and job.after is None else {})
            for job, path in zip(jobs, self.paths(jobs, seed), strict=True)
        ]

    def histories(self, jobs: Iterable[Job]) -> list[bytes]:
        """Return nothing, because the first request of a session makes the server hold its history."""
        return []

    def _new(self, rng: Any, tokens: int) -> Any:
        return rng.integers(*self.vocabulary, size=tokens, dtype=np.int32)


def to_rank(raw: bytes, rank: int) -> bytes:
    """Return a POST of ``connection.request`` with the DP rank that must serve it."""
    head, body = raw.split(b"\r\n\r\n", 1)
    body = b'%b,"routed_dp_rank":%d}' % (body[:-1], rank)
    fields, _ = head.rsplit(b" ", 1)
    return b"%b %d\r\n\r\n%b" % (fields, len(body), body)


class Homes:
    """Route that sends each session to the rank with the fewest tokens in flight at its start, as in the simulator."""

    def __init__(self, ranks: int) -> None:
        self._assign = Assign(ranks)

    def __call__(self, job: Job, raw: bytes) -> tuple[bytes, Callable[[], None]]:
        """Return the POST to send now, and the function to call after its answer."""
        request = Request.of(job)
        request.rank = self._assign.rank(request)
        return to_rank(raw, request.rank), lambda: self._assign.answered(request)
