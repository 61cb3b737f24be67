"""Requests in wire format, from jobs: every variant gets the same bytes. Prompts of sessions grow from turn to turn;
each goes to the rank that has its history."""

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


def without_decode_server(room: int) -> dict[str, Any]:
    """Return the fields of a request that a prefill server answers alone."""
    return {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_port": 1, "bootstrap_room": room}


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
            body |= without_decode_server(rooms.getrandbits(60))
        return request(body, headers=headers)


HELD = "held_tokens"
"""Custom parameter of a request: so many tokens of its prompt are in the prefix cache of whatever server it comes to
(``benchmark/rig/prefixes/kept_prefixes.py``)."""


@dataclass
class SessionPrompts(Prompts):
    """Token ids of sessions: a turn begins with the ``cached`` first tokens of an earlier turn, and its new ones occur
    nowhere else. So a server that keeps all prompts has exactly the cached ones."""

    def paths(self, jobs: Iterable[Job], seed: int) -> list[Any]:
        """Return the prompt of each job, an array of token ids. A history that no earlier turn has is made up."""
        rng = np.random.default_rng([self.seed, 3, seed])
        earlier: dict[int, list[Any]] = {}
        found = []
        for job in jobs:
            # The last turn, or the longest one: sub-agents go on from an earlier place, and leave the others' history.
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
        """Return a whole POST for each job. The first one of a session says that its history is held."""
        rooms, jobs = random.Random(seed), list(jobs)
        return [
            self._post(path.tolist(), rooms, job.slo_s, {HELD: job.cached} if job.cached and job.after is None else {})
            for job, path in zip(jobs, self.paths(jobs, seed), strict=True)
        ]

    def histories(self, jobs: Iterable[Job]) -> list[bytes]:
        """Return nothing: the first request of a session has its history held."""
        return []

    def _new(self, rng: Any, tokens: int) -> Any:
        return rng.integers(*self.vocabulary, size=tokens, dtype=np.int32)


def to_rank(raw: bytes, rank: int) -> bytes:
    """Return a POST of ``connection.request`` that names the data-parallel rank which is to serve it."""
    head, body = raw.split(b"\r\n\r\n", 1)
    body = b'%b,"routed_dp_rank":%d}' % (body[:-1], rank)
    fields, _ = head.rsplit(b" ", 1)
    return b"%b %d\r\n\r\n%b" % (fields, len(body), body)


class Homes:
    """Sends each session to one rank: the one with the fewest tokens under way when it begins, as in the simulator."""

    def __init__(self, ranks: int, seed: int) -> None:
        self._assign = Assign(ranks, "total_tokens", seed)

    def __call__(self, job: Job, raw: bytes) -> tuple[bytes, Callable[[], None]]:
        """Return what to send now, and what to call once it is answered."""
        request = Request.of(job)
        request.rank = self._assign.rank(request)
        return to_rank(raw, request.rank), lambda: self._assign.answered(request)
