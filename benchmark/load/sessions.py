"""Sessions in wire format: prompts that grow from turn to turn, each sent to the rank that has its history."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from laps_plan.sim.group import Assign
from laps_plan.sim.request import Request
from laps_plan.traffic.job import Job

from benchmark.load.prompts import Prompts

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
