"""Simulations of whole answers, on servers that prefill and decode, and on separate servers for prefill and decode."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from laps_plan.plan.figures import PARTS, Figures, Sample, warm_s
from laps_plan.plan.setup import IN_TIME, Objectives
from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s, quantiles
from laps_plan.sim.serving import LAPS, Answers, Serving, serve
from laps_plan.traffic.files import TOKEN_S
from laps_plan.traffic.given import Lengths, Traffic, stretched
from laps_plan.traffic.job import LONG, SHORT, Job
from laps_plan.traffic.streams import Trace, chain_conversations

CHUNKS = (512, 1024, 2048, 4096, 8192)
POLICIES = ("fcfs", "shortest-prefill-first")
DEFAULT = Serving("fcfs")
"""Stock SGLang with its defaults."""
SAFE = 0.8
"""Share of the objective for the time between tokens that is LAPS's target, because a step can be a slice late."""
STEPS, LEAST = 6, 0.2
"""Steps of a search for the highest rate, which are enough for 3%, and the lowest rate as a share of the estimated
capacity."""
SPAN = 2.0
"""Least time for which requests arrive in such a search, over the time that a mean answer may take: until the first
answers end, the streams become more and more."""
SEARCH_WARM, DRAIN = 0.5, 0.05
"""In such a search: first share of the time, which is not counted because overload makes waits grow over time; longest
wait after the last arrival, as a share of the time before."""
MOST_STREAMS = 256
"""Streams of a decode step in estimates of a capacity."""


def stock() -> list[Serving]:
    """Return the settings of SGLang that are compared."""
    found = [Serving(policy, chunk) for policy in POLICIES for chunk in CHUNKS]
    found += [replace(one, interval=1) for one in found]
    return found + [replace(one, mixed=True) for one in found if not one.interval]


@dataclass(frozen=True)
class Question(Objectives):
    """Question about servers that also decode. Times in seconds."""

    tbt_s: float
    """Objective for the time between tokens."""
    kv_tokens: int = 400_000
    """Tokens of context that a server's memory holds."""

    def laps(self, **knobs: Any) -> Serving:
        """Return LAPS with a target within the objective for the time between tokens, and with these knobs."""
        return Serving(LAPS, knobs={"tbt_ms": round(1e3 * SAFE * self.tbt_s, 3), **knobs})

    def laps_in_time(self) -> Serving:
        """Return the setting of ``laps`` with deadlines for first tokens, so that requests with spare time wait."""
        due_ms = (1e3 * self.short_s, 1e3 * self.long_s)
        return self.laps(ttft_slo_ms=due_ms)


@dataclass
class Row:
    """Results of one setting on the whole traffic. Times in seconds."""

    serving: Serving
    short: dict[str, float]
    """TTFT of short requests: p50, p90, p99; empty if there are none."""
    long: dict[str, float]
    mean: float
    tbt: dict[str, float]
    """Time between tokens: p50, p99, longest."""
    rate: float
    """Answers per second."""
    in_time: float
    """Share of the answers that are in time (0..1)."""
    parts: list[Figures] = field(repr=False)

    @classmethod
    def of(cls, serving: Serving, answers: Answers, q: Question) -> Row:
        ttft, short, logs = answers.ttft, answers.short, answers.logs
        alone = lone_s(q.profile, answers.new, np.zeros_like(answers.new), serving.chunk)
        sample = Sample(answers.at, ttft, answers.new, alone)
        return cls(
            serving,
            quantiles(ttft[short]),
            quantiles(ttft[~short]),
            float(ttft.mean()),
            {"p50": logs.quantile(0.5), "p99": logs.quantile(0.99), "longest": logs.quantile(1.0)},
            answers.rate,
            float(answers.in_time(q.short_s, q.long_s, q.tbt_s).mean()),
            [Figures.of(part, q) for part in sample.parts(PARTS)],
        )

    def value(self, figure: str) -> float:
        return FIGURES[figure](self)


FIGURES: dict[str, Callable[[Row], float]] = {
    f"{SHORT} P90": lambda r: r.short.get("p90", math.nan),
    f"{LONG} P90": lambda r: r.long.get("p90", math.nan),
    "mean TTFT": lambda r: r.mean,
    "answers/s": lambda r: r.rate,
    "in time": lambda r: r.in_time,
}
MORE = ("answers/s", "in time")
"""Figures for which larger is better."""


def stock_as_smooth(rows: Sequence[Row], laps: Row) -> list[Row]:
    """Return the stock settings with a P99 between tokens no longer than that of LAPS; else the shortest."""
    others = [r for r in rows if r.serving.policy != LAPS]
    most = max(laps.tbt["p99"], min(r.tbt["p99"] for r in others))
    return [r for r in others if r.tbt["p99"] <= most]


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Return the stock settings: those with the most answers in time first, equal ones by mean TTFT."""
    return sorted((r for r in rows if r.serving.policy != LAPS), key=lambda r: (-round(r.in_time, 2), r.mean))


def best(rows: Sequence[Row], figure: str) -> Row:
    """Return the best row in one figure, in hindsight; the first row if no row has the figure."""
    known = [r for r in rows if not math.isnan(r.value(figure))] or list(rows)
    return (max if figure in MORE else min)(known, key=lambda r: r.value(figure))


def sustained(q: Question, jobs: Sequence[Job]) -> float:
    """Return the requests per second that no schedule exceeds for long: a server's time goes to the tokens of prompts,
    and to decode steps with as many streams as memory and the objective for the time between tokens allow. 0 if there
    can be no stream."""
    new, cached, output = _tokens(jobs)
    steps = output - 1
    prompt_s = device_s(q.profile, jobs)[0] - q.profile.coefficients.fixed * float(new.mean()) / CHUNKS[-1]
    if not steps.any():
        return 1.0 / prompt_s
    context = float((steps * (new + cached + steps / 2)).sum() / steps.sum())

    def too_many(streams: int) -> bool:
        return streams * context > q.kv_tokens or q.profile.decode_s(streams, streams * context) > q.tbt_s

    most = bisect_left(range(1, math.ceil(q.kv_tokens / context) + 1), True, key=too_many)
    return 0.0 if not most else 1.0 / (prompt_s + float(steps.mean()) * q.profile.decode_s(most, most * context) / most)


def with_answer_lengths(traffic: Traffic, answers: Lengths, seed: int) -> Traffic:
    """Return the traffic with lengths of answers, drawn from ``answers`` if the traffic has none."""
    if any(job.output > 1 for job in traffic.jobs):
        # The time of an answer is simulated here, so that it is not part of the pause any more.
        jobs = [
            job if job.after is None or not job.pause_s else replace(job, pause_s=_own_s(job, traffic.jobs[job.after]))
            for job in traffic.jobs
        ]
        return replace(traffic, jobs=jobs)
    rng = random.Random(f"{seed} answers")
    return replace(traffic, jobs=[replace(job, output=max(1, answers(rng)[0])) for job in traffic.jobs])


def _own_s(job: Job, before: Job) -> float:
    return max(0.0, job.pause_s - TOKEN_S * before.output)


def _tokens(jobs: Sequence[Job]) -> Iterator[Any]:
    """Yield the new, the cached and the answers' tokens of the jobs, an array of each."""
    for name in ("new", "cached", "output"):
        yield np.array([getattr(job, name) for job in jobs], dtype=float)


def device_s(profile: Profile, jobs: Sequence[Job]) -> tuple[float, float]:
    """Return the mean device times of a prompt in full chunks and of an answer among MOST_STREAMS streams (seconds)."""
    new, cached, output = _tokens(jobs)
    c = profile.coefficients
    prompt = c.alpha * new * (new + 2 * cached) + c.linear * new + c.gamma_r * cached + c.per_request
    prompt += c.fixed * new / CHUNKS[-1]
    each = profile.decode_s(MOST_STREAMS, 0) / MOST_STREAMS
    context = profile.decode_s(1, 1) - profile.decode_s(1, 0)
    answer = (output - 1) * (each + context * (new + cached + output / 2))
    return float(prompt.mean()), float(answer.mean())


@dataclass
class Trials:
    """Simulations of settings, with reports of progress."""

    question: Question
    traffic: Traffic
    search: int = 900
    """Least requests per server of a simulation in a search."""
    tell: Callable[[str], None] = lambda what: None
    capacity: float = field(init=False)
    """Estimated requests per second of one server."""

    def __post_init__(self) -> None:
        self.capacity = 1.0 / sum(device_s(self.question.profile, self.traffic.jobs))

    @property
    def load(self) -> float:
        """Return the offered work divided by the estimated capacity of the servers."""
        return self.traffic.rate / (self.capacity * self.question.servers)

    def row(self, serving: Serving) -> Row:
        """Return the results of ``serving`` on the whole traffic."""
        self.tell(serving.name)
        jobs, q = self.traffic.jobs, self.question
        return Row.of(serving, serve(serving, Trace(jobs), q.profile, q.servers, warm_s=warm_s(jobs)), q)

    def find_highest_rate(
        self, serving: Serving, q: Question, servers: int, jobs: Sequence[Job] | None = None
    ) -> float:
        """Return the highest rate (requests per second) at which IN_TIME of each class are in time and all streams find
        memory; 0 if that is below LEAST of the estimate. ``jobs``: jobs instead of those of the traffic."""
        jobs = self.traffic.jobs if jobs is None else jobs
        low, high = LEAST * servers / sum(device_s(q.profile, jobs)), servers * sustained(q, jobs)
        if high < low or not self._meets_objectives(serving, q, servers, jobs, low):
            return 0.0
        # A simulation is too short to tell a rate that is a little too high: streams gather for minutes.
        if self._meets_objectives(serving, q, servers, jobs, high):
            return high
        for _ in range(STEPS):
            middle = math.sqrt(low * high)
            if self._meets_objectives(serving, q, servers, jobs, middle):
                low = middle
            else:
                high = middle
        return low

    def _meets_objectives(self, serving: Serving, q: Question, servers: int, jobs: Sequence[Job], rate: float) -> bool:
        self.tell(f"{serving.name} at {rate:.3g} requests/s")
        answer_s = q.tbt_s * sum(job.output for job in jobs) / len(jobs)
        load = chain_conversations(jobs[: max(self.search * servers, math.ceil(SPAN * answer_s * rate))])
        load = stretched(load, (len(load) - 1) / (load[-1].at_s - load[0].at_s) / rate)
        begin_s, end_s = load[0].at_s, load[-1].at_s
        counted_s = begin_s + SEARCH_WARM * (end_s - begin_s)
        answers = serve(serving, Trace(load), q.profile, servers, warm_s=counted_s)
        # Turns that wait for answers arrive after ``end_s``.
        if (answers.at + answers.ttft - np.maximum(answers.at, end_s)).max() > DRAIN * (end_s - begin_s):
            return False
        if max(log.most_context for log in answers.logs.logs) > q.kv_tokens:
            return False
        good = answers.in_time(q.short_s, q.long_s, q.tbt_s)
        classes = (good[answers.short], good[~answers.short])
        return all(of.mean() >= IN_TIME for of in classes if len(of))


def splits(trials: Trials, jobs: Sequence[Job], servers: int) -> Iterator[int]:
    """Yield the numbers of prefill servers next to the share of prefill in the work."""
    prompt, answer = device_s(trials.question.profile, jobs)
    wanted = servers * prompt / (prompt + answer)
    yield from sorted({min(servers - 1, max(1, n)) for n in (math.floor(wanted), math.ceil(wanted))})
