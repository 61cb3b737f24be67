"""Answer to one question: all data of the tables, the page and the JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from laps_plan.plan.advice import Advice, advise, max_simulations
from laps_plan.plan.figures import Change, Figures, Sample
from laps_plan.plan.reach import RUNS, STEPS, Reach, find_highest_load, servers_needed
from laps_plan.plan.setup import STOCK, Question, Setup, setups_to_compare
from laps_plan.plan.trials import Trials
from laps_plan.profile import Profile
from laps_plan.traffic.given import Traffic
from laps_plan.traffic.job import LONG, SHORT, THRESHOLD

POINTS = 200
"""Points of a curve of the page."""
HOSTS = (0.5, 2.0)
"""Factors by which the host's times are multiplied."""


@dataclass
class Side:
    """Results of one of the compared setups on the whole traffic."""

    setup: Setup
    figures: Figures
    change: Change | None
    """Change from this setup to the advised LAPS setup; None for the advised setup itself."""
    curves: dict[str, list[float]]
    """TTFT (ms) by class, at even steps of the share of requests."""
    reach: Reach
    servers: int | None
    """Servers needed for the objective; None = not found."""


@dataclass
class Answer:
    """Results of all simulations for a question."""

    question: Question
    traffic: Traffic
    """Traffic as simulated, in order of time."""
    capacity: float
    """Maximum requests per second of one server."""
    load: float
    """Offered work divided by the capacity of the servers."""
    hopeless: float
    """Share of the requests that are late even if alone on an idle server (0..1)."""
    sides: list[Side]
    advice: Advice
    hosts: dict[float, Change]
    """Figures of LAPS relative to the best stock policy, by the factor on the host's times."""
    searched: int
    """Requests simulated for each setup in the search for flags."""
    seconds: float
    """Time that the simulations took."""


def total(trials: Trials) -> int:
    """Return the maximum number of requests that ``answer`` simulates."""
    question = trials.question
    sides = len(setups_to_compare(question)) + 1 + len(STOCK)
    tried, loaded = (sum(map(len, parts)) for parts in (trials.parts, trials.loaded(question.servers)))
    searches = (max_simulations(question) + 2 * len(HOSTS)) * tried + sides * (RUNS + 1 + STEPS) * loaded
    return sides * len(trials.traffic.jobs) + searches


def answer(trials: Trials) -> Answer:
    begin = time.monotonic()
    question = trials.question
    advice = advise(trials)
    own = trials.whole(advice.laps)
    sides = []
    for setup in advice.setups:
        sample = trials.whole(setup)
        reach = find_highest_load(trials, setup, question.servers)
        curves = {kind: _curve(sample, kind) for kind in (SHORT, LONG)}
        needed = servers_needed(trials, setup, reach.load)
        change = advice.against.get(setup.name)
        sides.append(Side(setup, Figures.of(sample, question), change, curves, reach, needed))
    hosts = {}
    for factor in HOSTS:
        profile = host(question.profile, factor)
        hosts[factor] = Change.of(*(trials.stretches(s, profile) for s in (advice.laps, advice.stock)))
    alone = replace(own, ttft=own.lone)
    hopeless = 1.0 - Figures.of(alone, question).in_time
    searched = sum(map(len, trials.parts))
    took = time.monotonic() - begin
    return Answer(
        question, trials.traffic, trials.capacity, trials.load, hopeless, sides, advice, hosts, searched, took
    )


def _curve(sample: Sample, kind: str) -> list[float]:
    ttft = 1e3 * sample.ttft[(sample.new <= THRESHOLD) == (kind == SHORT)]
    return np.quantile(ttft, np.linspace(0.0, 1.0, POINTS)).tolist() if len(ttft) else []


def host(profile: Profile, factor: float) -> Profile:
    """Return the profile with all host times multiplied by ``factor``."""
    launches = ("launch_s", "slices_launch_s")
    names = ("front_s", "front_token_s", "poll_s", "step_host_s", "reply_s", *launches)
    return replace(profile, **{name: factor * getattr(profile, name) for name in names})
