"""Worth of each rule of the policy: the rules are taken out one at a time, on the same simulated arrivals.

    python -m benchmark.sim.rules [--rules NAME...] [--loads NAME...] [--profiles NAME...] [--seeds 3]

A ratio is a figure without the rule over the same figure with it, as geometric mean over seeds. A figure has moved if
its ratio differs from 1 by more than 3% and every seed is on the same side of 1.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from laps_core.pools.config import AllocConfig
from laps_plan.profile import Profile
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.variants import run
from laps_plan.traffic.job import THRESHOLD
from laps_plan.traffic.little import OFF

from benchmark.results import Column, Command, Comparison, Figure, Parser, Piece, Table, count, quantile
from benchmark.sim.loads import CHUNK, LOADS, SERVERS, Kind, Load
from benchmark.sim.without import ALL, Rule

PROFILES = ("h200-qwen3-8b", "h200-qwen3-30b-a3b", "h200-qwen3-32b")
GROUP = "h200-deepseek-v3-dp8"
PLACES: Mapping[Kind, Sequence[str]] = {
    "policy": PROFILES, "memory": (PROFILES[0], PROFILES[2]), "group": (GROUP,), "router": PROFILES[:2],
    "divided": PROFILES[:2],
}  # fmt: skip
"""Profiles with which each kind of rules is simulated. All kinds but "group" use the overlap loop."""
FIRST_SEED = 101
WARM = 0.05
"""Share of an open load's time that is not counted."""
MOVED = 0.03
HEADS = {
    "short_p90_s": "short P90", "long_p90_s": "long P90", "mean_s": "mean TTFT", "slowdown": "mean slowdown",
    "requests_per_s": "requests/s", "in_time": "in time",
}  # fmt: skip
LETTERS = dict(zip(HEADS, "SLMDRT", strict=True))
FORMS = {"slowdown": (".2f", 1.0), "requests_per_s": (".1f", 1.0), "in_time": (".1%", 1.0)}
COLUMNS = tuple(
    Column(head if name in FORMS else f"{head} ms", (name,), *FORMS.get(name, (".0f", 1e3)), statistics.fmean)
    for name, head in HEADS.items()
)


Result = dict[str, float]
"""Figures of one simulation: by name in HEADS, and LITTLE. Times in seconds; NaN for a figure that there is not."""
LITTLE = "littles_ratio"
"""Little's ratio of a closed loop."""


def figures(o: Outcome, load: Load, due_s: Mapping[float, float]) -> Result:
    """Return the figures of an outcome without its run-in. ``due_s``: deadlines by time of arrival (seconds)."""
    at, ttft, new = (np.asarray(getattr(o.record, name)) for name in ("at", "ttft", "new"))
    slow = ttft / lone_s(o.profile, new, np.asarray(o.record.cached), CHUNK)
    rate, little = o.rate, math.nan
    if load.clients:
        begin, end = o.steady_span()
        found = o.steady(load.clients, load.pause.mean_s)
        rate, little = found.requests_per_s, found.littles_ratio
        counted = (at >= begin) & (at < end)
    else:
        counted = at >= at.min() + WARM * (at.max() - at.min())
    met = (took <= due_s[sent] for sent, took in zip(at[counted], ttft[counted], strict=True))
    return {
        "short_p90_s": quantile(ttft[counted & (new <= THRESHOLD)], 90),
        "long_p90_s": quantile(ttft[counted & (new > THRESHOLD)], 90),
        "mean_s": float(ttft[counted].mean()),
        "slowdown": float(slow[counted].mean()),
        "requests_per_s": rate,
        "in_time": statistics.fmean(met) if due_s else math.nan,
        LITTLE: little,
    }


class Effect(NamedTuple):
    """One figure without a rule over the same figure with it."""

    ratio: float
    """Geometric mean over seeds."""
    agreed: bool
    """True if all seeds are on the same side of 1."""

    @property
    def moved(self) -> bool:
        """Return True if the effect is more than chance and rounding."""
        return self.agreed and abs(math.log(self.ratio)) > math.log1p(MOVED)

    @classmethod
    def of(cls, without: Sequence[float], today: Sequence[float]) -> Effect | None:
        """Compare a figure without and with the rule, seed by seed. Return None if no seed has positive values."""
        logs = [math.log(a / b) for a, b in zip(without, today, strict=True) if a > 0.0 and b > 0.0]
        if not logs:
            return None
        return cls(math.exp(statistics.fmean(logs)), all(x > 0.0 for x in logs) or all(x < 0.0 for x in logs))


Effects = dict[str, Effect]
"""Effects by the name of the figure."""


def effects(without: Sequence[Result], today: Sequence[Result]) -> Effects:
    """Return the effect of the rule on each figure."""
    found = {name: Effect.of(*([s[name] for s in seen] for seen in (without, today))) for name in LETTERS}
    return {name: effect for name, effect in found.items() if effect is not None}


class Case(NamedTuple):
    """Case in which a rule was taken out."""

    profile: str
    load: str

    def __str__(self) -> str:
        return f"{self.load}, {self.profile.removeprefix('h200-qwen3-')}"


Found = dict[str, dict[Case, Effects]]
"""Rule name -> case -> effects."""
Today = dict[Case, list[Result]]
"""Figures with all rules: one entry per seed."""


def simulated(load: Load, profile: Profile, rule: Rule | None, *, seed: int) -> Result:
    """Run one simulation, without `rule` if there is one."""
    seen_as = load.profile(profile)
    stream = load.stream(seen_as, load.requests, seed)
    alloc = {"initial_short": SERVERS // 2} if load.kind == "divided" else {}
    due_s = {job.at_s: job.slo_s or math.inf for job in stream.arrivals()} if load.deadlines else {}
    with rule.taken_out() if rule else nullcontext():
        outcome = run(
            "laps", stream, seen_as, chunk=None if load.kind == "group" else CHUNK,
            knobs=rule.knobs if rule else {}, overlap=load.kind != "group", seed=seed, memory=load.memory,
            servers=load.servers, router="pools", alloc=AllocConfig(**{**alloc, **(rule.alloc if rule else {})}),
        )  # fmt: skip
    return figures(outcome, load, due_s)


def run_case(case: Case, names: Sequence[str], seeds: Sequence[int]) -> tuple[list[Result], dict[str, Effects]]:
    """Return the figures of one case with all rules, and the effects of the rules in ``names`` that apply to it."""
    load = LOADS[case.load]
    once = partial(simulated, load, Profile.load(case.profile))
    today = [once(None, seed=seed) for seed in seeds]
    mine = [r for r in ALL if r.name in names and r.kind == load.kind and (load.deadlines or not r.deadlines)]
    return today, {r.name: effects([once(r, seed=seed) for seed in seeds], today) for r in mine}


def study(names: Sequence[str], args: argparse.Namespace) -> tuple[Found, Today]:
    """Return the effects of each rule, and the figures with all rules; one case runs on each core."""
    kinds = {rule.kind for rule in ALL if rule.name in names}
    cases = [
        Case(profile, name)
        for name in args.loads
        for profile in PLACES[LOADS[name].kind]
        if profile in args.profiles and LOADS[name].kind in kinds
    ]
    found: Found = {name: {} for name in names}
    today: Today = {}
    seeds = range(args.seed, args.seed + args.seeds)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        each = pool.map(partial(run_case, names=names, seeds=seeds), cases)
        for case, (seen, by) in zip(cases, each, strict=True):
            today[case] = seen
            for name, one in by.items():
                found[name][case] = one
            args.say(str(case))
    return found, today


def cell(by: Effects) -> str:
    """Return the ratios that moved, as text."""
    return " ".join(f"{LETTERS[name]} {effect.ratio:.2f}" for name, effect in by.items() if effect.moved)


def largest(cases: Mapping[Case, Effects]) -> tuple[Case, str, Effect] | None:
    """Return the case, figure and effect that moved most; None if no figure moved."""
    moved = [(c, name, e) for c, by in cases.items() for name, e in by.items() if e.moved]
    return max(moved, key=lambda one: abs(math.log(one[2].ratio)), default=None)


def summary(found: Found, rules: Sequence[Rule]) -> Table:
    rows = []
    for rule in rules:
        cases = found[rule.name]
        top = largest(cases)
        said = "none" if top is None else f"{HEADS[top[1]]} x {top[2].ratio:.2f}, {top[0]}"
        moved = sum(any(e.moved for e in by.values()) for by in cases.values())
        rows.append((rule.name, rule.instead, said, f"{moved} of {len(cases)}", rule.bound))
    heads = ("rule", "without it", "largest effect of taking it out", "cases with an effect", "promise that needs it")
    return Table("What each rule is worth", heads, rows)


def matrix(found: Found, rules: Sequence[Rule], profile: str) -> Table:
    """Return the ratios that moved in each case of one profile."""
    loads = list(dict.fromkeys(c.load for cases in found.values() for c in cases))
    cells = {(rule, c.load): cell(by) for rule, of in found.items() for c, by in of.items() if c.profile == profile}
    rows = [(rule.name, *(cells.get((rule.name, load), "-") for load in loads)) for rule in rules]
    note = (
        "S short P90, L long P90, M mean TTFT, D mean slowdown, R requests/s, T share in time: without the rule over "
        f"with it, where that moved by more than {MOVED:.0%} and all seeds agree on the direction."
    )
    return Table(profile, ("", *loads), rows, note)


def raw(found: Found, today: Mapping[Case, Sequence[Result]]) -> dict[str, Any]:
    return {
        "effects": {
            rule: [{**c._asdict(), **{name: [e.ratio, e.agreed] for name, e in by.items()}} for c, by in cases.items()]
            for rule, cases in found.items()
        },
        "today": [
            {**case._asdict(), "seeds": [{k: None if math.isnan(v) else v for k, v in s.items()} for s in seen]}
            for case, seen in today.items()
        ],
    }


def options(p: Parser) -> None:
    for name, known in (("rules", [r.name for r in ALL]), ("loads", list(LOADS)), ("profiles", [*PROFILES, GROUP])):
        p.add_argument(f"--{name}", nargs="+", choices=known, default=known)
    p.add_argument("--seeds", type=count, default=3, help="number of seeds, from --seed on (3)")


def measure(args: argparse.Namespace) -> Piece:
    rules = [r for r in ALL if r.name in args.rules]
    found, today = study([r.name for r in rules], args)
    text = (
        "Each line is the policy without one of its rules, on the same arrivals. "
        f'{args.seeds} seeds; the overlap loop, but for ranks. "Near" '
        f'clients are back within a millisecond; "tight": memory runs out; "ranks": eight data-parallel ranks '
        f'that plan together; "fleet": {SERVERS} servers behind the router, "divided": in two pools. '
        "There is no host time per slice: which batches are too small for slices is not in it."
    )
    where = list(dict.fromkeys(c.profile for c in today))
    piece = Piece("sim-rules", "What each rule is worth", text, args.seed, [summary(found, rules)])
    piece.tables += [matrix(found, rules, profile) for profile in where]
    for profile in where:
        seen = Comparison({c.load: of for c, of in today.items() if c.profile == profile})
        piece.tables.append(seen.table(f"With all rules: {profile}", "", COLUMNS))
    if ratios := [s[LITTLE] for seen in today.values() for s in seen if not math.isnan(s[LITTLE])]:
        worst = max(ratios, key=lambda x: abs(x - 1.0))
        met = abs(worst - 1.0) <= OFF
        piece.figures.append(Figure("Little's ratio furthest from 1", worst, f"within {OFF:.0%} of 1", met))
    for rule in rules:
        if (top := largest(found[rule.name])) is not None:
            piece.judge(f"{rule.name}: {HEADS[top[1]]} without it, {top[0]}", top[2].ratio)
    piece.data = raw(found, today)
    return piece


COMMAND = Command("benchmark.sim.rules", __doc__, measure, options, out="rules", seed=FIRST_SEED)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
