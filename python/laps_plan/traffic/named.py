"""Loads by name, for real and simulated servers. All randomness comes from a seed, never from a variant or a clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from laps_plan.traffic import traces, turns
from laps_plan.traffic.job import THRESHOLD, Job
from laps_plan.traffic.lengths import Sizes, fixed, lmsys, log_uniform, mix, uniform
from laps_plan.traffic.streams import chain_conversations, poisson, times


@dataclass(frozen=True)
class Offer:
    """Amount of load relative to a measured machine."""

    utilisation: float
    """Offered work divided by the capacity of stock fcfs."""
    span_s: float
    capacity_per_s: float
    """Requests/s of the workload's ``sample`` in a closed loop on stock fcfs."""
    lone_s: Callable[[int], float]
    """Function that returns the time of a prefill of this many tokens alone (seconds)."""


@dataclass(frozen=True)
class Workload:
    """A load by name."""

    name: str
    what: str
    reuses: bool = field(default=False, kw_only=True)
    """True if prompts share beginnings; only end-to-end servers show the effect."""

    def sample(self, n: int, rng: random.Random) -> list[Job]:
        """Return jobs whose rate in a closed loop is the capacity."""
        raise NotImplementedError

    def arrivals(self, offer: Offer, rng: random.Random) -> list[Job]:
        """Return jobs in order of their times."""
        raise NotImplementedError


@dataclass(frozen=True)
class Drawn(Workload):
    """Lengths drawn independently; times Poisson, or burstier."""

    lengths: Sizes
    cv: float = 1.0
    """Coefficient of variation of the times between arrivals: 1 = Poisson, more = bursts."""

    def sample(self, n: int, rng: random.Random) -> list[Job]:
        return [Job(0.0, self.lengths(rng)) for _ in range(n)]

    def arrivals(self, offer: Offer, rng: random.Random) -> list[Job]:
        rate, shape = offer.utilisation * offer.capacity_per_s, self.cv**-2
        due = list(times(lambda: rng.gammavariate(shape, 1.0 / (rate * shape)), offer.span_s))
        return [Job(at, self.lengths(rng)) for at in due]


@dataclass(frozen=True)
class Replayed(Workload):
    """Consecutive rows of a trace: lengths in their order, times stretched to the wanted rate."""

    rows: Sequence[Job]

    def sample(self, n: int, rng: random.Random) -> list[Job]:
        return [replace(row, at_s=0.0) for row in rng.choices(self.rows, k=n)]

    def arrivals(self, offer: Offer, rng: random.Random) -> list[Job]:
        wanted = max(2, min(len(self.rows) - 1, round(offer.utilisation * offer.capacity_per_s * offer.span_s)))
        first = rng.randrange(len(self.rows) - wanted)
        rows = self.rows[first : first + wanted + 1]
        stretch = offer.span_s / max(1e-9, rows[-1].at_s - rows[0].at_s)
        return [replace(row, at_s=(row.at_s - rows[0].at_s) * stretch) for row in rows[:-1]]


@dataclass(frozen=True)
class Sea(Workload):
    """Short prompts at Poisson times, and long prompts at even intervals that make up a share of the *work*."""

    short: Sizes
    long_tokens: int
    long_work: float
    """Share of the offered work (0..1)."""

    def sample(self, n: int, rng: random.Random) -> list[Job]:
        return [Job(0.0, self.short(rng)) for _ in range(n)]

    def arrivals(self, offer: Offer, rng: random.Random) -> list[Job]:
        short_rate = offer.utilisation * (1.0 - self.long_work) * offer.capacity_per_s
        long_rate = offer.utilisation * self.long_work / offer.lone_s(self.long_tokens)
        jobs = [Job(at, self.short(rng)) for at in poisson(short_rate, offer.span_s, rng)]
        every = 1.0 / long_rate
        count = max(1, round(offer.span_s * long_rate))
        jobs += [Job(0.5 * every + i * every, self.long_tokens) for i in range(count)]
        return sorted(jobs, key=lambda job: job.at_s)


@dataclass(frozen=True)
class Turns(Workload):
    """Conversations: each prompt is the whole history and a few new tokens. Some conversations open with a document.

    A user sends the next turn a pause after the last turn was due, but never before the answer to that turn.
    """

    longest: int
    """A conversation ends before its prompt exceeds this (tokens)."""
    turns: int = 8
    pause_s: float = 0.5
    """Mean time between the turns of one user."""
    document_share: float = 0.1
    """Share of conversations that open with a document (0..1)."""

    def _conversation(self, stream: int, begin_s: float, rng: random.Random) -> list[Job]:
        jobs, history, at = [], 0, begin_s
        for turn in range(self.turns):
            opens = turn == 0 and rng.random() < self.document_share
            new = rng.randint(self.longest // 4, self.longest // 2) if opens else rng.randint(16, 160)
            if history + new > self.longest:
                break
            jobs.append(Job(at, new, history, stream, continues_stream=True))
            history += new
            at += rng.expovariate(1.0 / self.pause_s)
        return jobs

    def sample(self, n: int, rng: random.Random) -> list[Job]:
        jobs: list[Job] = []
        while len(jobs) < n:
            # Each job stands alone, because a history that was not sent before is in no cache.
            jobs += [replace(j, at_s=0.0, cached=0, continues_stream=False) for j in self._conversation(0, 0.0, rng)]
        return jobs[:n]

    def arrivals(self, offer: Offer, rng: random.Random) -> list[Job]:
        rate = offer.utilisation * offer.capacity_per_s / self.turns
        users = [self._conversation(1 + i, at, rng) for i, at in enumerate(poisson(rate, offer.span_s, rng))]
        return chain_conversations(job for user in users for job in user if job.at_s < offer.span_s)


@dataclass(frozen=True)
class Agents(Workload):
    """Sessions of coding agents, ``each`` turns of a session: a turn follows the previous answer after a pause."""

    longest: int
    """Prompts are cut to this length (tokens)."""
    each: int = 11
    pause_s: float = 30.0
    """Longest pause of a client between two turns (seconds)."""
    token_s: float = 0.02
    """Time per token of output (seconds)."""

    def _sessions(self) -> list[list[turns.Turn]]:
        return turns.agents(self.longest, self.pause_s, self.token_s)

    def sample(self, n: int, rng: random.Random) -> list[Job]:
        every = [turn for session in self._sessions() for turn in session]
        return [Job(0.0, turn.new, turn.cached) for turn in rng.choices(every, k=n)]

    def arrivals(self, offer: Offer, rng: random.Random) -> list[Job]:
        rate = offer.utilisation * offer.capacity_per_s
        begun = turns.stretches(self._sessions(), self.each, rate, offer.span_s, rng)
        return turns.jobs(begun, offer.span_s)


HEADLINE_SHORT = (16, 128)
OVERLOAD_SHORT = (128, 256)
"""Long for short prompts, so that the device is overloaded and not the cores, which also read the requests."""
CLOSED = "closed"


@dataclass(frozen=True)
class Scale:
    """Prompt lengths that suit a machine (tokens)."""

    longest: int
    """Longest prompt."""
    long: int
    """Typical long prompt: several chunks."""


def _azure(scale: Scale) -> Workload:
    factor, rows = traces.shrink(traces.read("azure_conv"), scale.longest)
    return Replayed("azure", f"Azure conversation trace (2023), lengths x {factor:.3g}", rows)


def _mooncake(scale: Scale) -> Workload:
    factor, rows = traces.shrink(traces.read("mooncake_synthetic"), scale.longest)
    what = (
        f"Mooncake synthetic trace, lengths x {factor:.3g}; cached tokens of the trace are the beginning of one common "
        "document"
    )
    return Replayed("mooncake", what, rows, reuses=True)


def _lmsys(scale: Scale) -> Workload:
    what = "composite: lengths of LMSYS-Chat-1M prompts (bytes / 4), Poisson arrivals"
    return Drawn("lmsys", what, lmsys(scale.longest))


def _mixed(scale: Scale) -> Workload:
    low, high = HEADLINE_SHORT
    what = f"90% of {low} to {high} tokens, 10% of {scale.long}, Poisson arrivals"
    return Drawn("mixed", what, mix(uniform(*HEADLINE_SHORT), fixed(scale.long), 0.1))


def _spread(name: str, cv: float, how: str) -> Callable[[Scale], Workload]:
    def make(scale: Scale) -> Workload:
        top = scale.long
        what = f"80% of 16 to {THRESHOLD} tokens, 20% of {THRESHOLD} to {top} (each doubling as likely), {how}"
        return Drawn(name, what, mix(uniform(16, THRESHOLD), log_uniform(THRESHOLD + 1, top), 0.2), cv)

    return make


def _code(scale: Scale) -> Workload:
    typical, top = 1500 * scale.longest / 8192, scale.longest

    def lengths(rng: random.Random) -> int:
        if rng.random() < 0.1:
            return rng.randint(16, THRESHOLD)
        return min(top, max(THRESHOLD + 1, round(rng.lognormvariate(math.log(typical), 0.75))))

    what = (
        f"like code completion: 10% of 16 to {THRESHOLD} tokens, the others log-normal around {typical:.0f} with a "
        f"tail to {top}, bursty arrivals (gamma, CV 2)"
    )
    return Drawn("code", what, lengths, 2.0)


def _whale(scale: Scale) -> Workload:
    what = (
        f"one prompt of {scale.longest} tokens at even intervals over a sea of 16 to 128 tokens (one 100k prompt "
        "every 30 s, scaled): half of the work each"
    )
    return Sea("whale", what, uniform(*HEADLINE_SHORT), scale.longest, 0.5)


def _overload(scale: Scale) -> Workload:
    what = (
        f"prompts of {scale.long} tokens that make up a sixth of the work, in "
        f"more of {OVERLOAD_SHORT[0]} to {OVERLOAD_SHORT[1]} tokens than the machine can do"
    )
    return Sea("overload", what, uniform(*OVERLOAD_SHORT), scale.long, 1.0 / 6.0)


def _turns(scale: Scale) -> Workload:
    what = "conversations of up to 8 turns of 16 to 160 tokens on their growing history, one in ten about a document"
    return Turns("turns", what, scale.longest, reuses=True)


def _agents(scale: Scale) -> Workload:
    what = (
        f"sessions of coding agents on histories of up to {scale.longest} tokens, 11 turns of each; a turn follows the "
        "answer before it after its client's pause, 30 s at most, and 20 ms for each token of that answer"
    )
    return Agents("agents", what, scale.longest, reuses=True)


OPEN: dict[str, Callable[[Scale], Workload]] = {
    "mixed": _mixed,
    "poisson": _spread("poisson", 1.0, "Poisson arrivals"),
    "bursty": _spread("bursty", 3.0, "bursty arrivals (gamma, CV 3)"),
    "azure": _azure,
    "code": _code,
    "mooncake": _mooncake,
    "lmsys": _lmsys,
    "turns": _turns,
    "agents": _agents,
    "whale": _whale,
    "overload": _overload,
}


def make(name: str, scale: Scale) -> Workload:
    """Return the workload of this name. Raises ValueError for an unknown name."""
    if name not in OPEN:
        raise ValueError(f"no workload {name!r}: {', '.join((CLOSED, *OPEN))}")
    return OPEN[name](scale)
