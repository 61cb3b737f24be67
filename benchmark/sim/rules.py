"""Worth of each rule of the policy: they are taken out one at a time, on the same arrivals, simulated.

    python -m benchmark.sim.rules [--rules NAME...] [--loads NAME...] [--profiles NAME...] [--seeds 3] [--times 1]

A ratio is a figure without the rule over the same with it, the geometric mean over seeds. It counts as moved where it
is off by more than 3% and every seed is on the same side of 1.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from laps_core.pools.config import AllocConfig
from laps_plan.profile import Profile
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic.little import OFF, Asked, steady

from benchmark.results.piece import Figure, Piece, Table, count, parser
from benchmark.rig.progress import Progress
from benchmark.sim.beyond import BEYOND
from benchmark.sim.loads import CHUNK, DEADLINE, LOADS, SERVERS, Kind, Load
from benchmark.sim.without import RULES, Rule

PROFILES = ("h200-qwen3-8b", "h200-qwen3-30b-a3b", "h200-qwen3-32b")
OVERLAP, NORMAL = "overlap", "normal"
GROUP = "h200-deepseek-v3-dp8"
PLACES: Mapping[Kind, Sequence[tuple[str, str]]] = {
    "policy": (*((OVERLAP, p) for p in PROFILES), (NORMAL, PROFILES[0])),
    "memory": ((OVERLAP, PROFILES[0]), (OVERLAP, PROFILES[2])),
    "group": ((NORMAL, GROUP),),
    "router": ((OVERLAP, PROFILES[0]), (OVERLAP, PROFILES[1])),
}
"""Event loops and profiles that each kind of rules is tried with."""
ALL = (*RULES, *BEYOND)
FIRST_SEED = 101
THRESHOLD, WARM = 256, 0.05
MOVED = 0.03
LETTERS = {
    "short_p90_s": "S", "long_p90_s": "L", "mean_s": "M", "slowdown": "D", "requests_per_s": "R", "in_time": "T",
}  # fmt: skip
HEADS = {
    "short_p90_s": "short P90", "long_p90_s": "long P90", "mean_s": "mean TTFT", "slowdown": "mean slowdown",
    "requests_per_s": "requests/s", "in_time": "in time",
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """One simulation, its run-in left out. Times in seconds; not a number where there were no such requests."""

    short_p90_s: float
    long_p90_s: float
    mean_s: float
    slowdown: float
    requests_per_s: float
    in_time: float
    """Share of requests within their deadlines (0..1); not a number where they have none."""
    littles_ratio: float
    """Little's ratio of a closed loop; not a number for an open one."""

    @classmethod
    def of(cls, o: Outcome, load: Load) -> Seen:
        """Return the figures of an outcome."""
        at, ttft, new = (np.asarray(getattr(o.record, name)) for name in ("at", "ttft", "new"))
        slow = ttft / lone_s(o.profile, new, np.asarray(o.record.cached), CHUNK)
        rate, little = o.rate, math.nan
        if load.clients:
            begin, end = (float(np.quantile(at, share)) for share in (0.1, 0.9))
            pause_s = load.pause.mean_s
            rows = zip(o.record.client, o.record.at, o.record.ttft, o.record.new, strict=True)
            asked = [Asked(client, sent, took + pause_s, took, n) for client, sent, took, n in rows]
            found = steady(asked, load.clients, begin, end)
            rate, little = found.requests_per_s, found.littles_ratio
            counted = (at >= begin) & (at < end)
        else:
            counted = at >= at.min() + WARM * (at.max() - at.min())
        short = new <= THRESHOLD
        in_time = float((slow <= DEADLINE)[counted].mean()) if load.deadlines else math.nan
        short_s, long_s = (
            float(np.percentile(ttft[mask], 90)) if mask.any() else math.nan
            for mask in (counted & short, counted & ~short)
        )
        mean_s, slowdown = float(ttft[counted].mean()), float(slow[counted].mean())
        return cls(short_s, long_s, mean_s, slowdown, rate, in_time, little)


class Effect(NamedTuple):
    """One figure without a rule over the same with it."""

    ratio: float
    """Geometric mean over seeds."""
    agreed: bool
    """Every seed is on the same side of 1."""

    @property
    def moved(self) -> bool:
        """By more than chance, as far as the seeds tell, and by more than matters."""
        return self.agreed and abs(math.log(self.ratio)) > math.log1p(MOVED)

    @classmethod
    def of(cls, without: Sequence[float], today: Sequence[float]) -> Effect | None:
        """Return the effect on one figure, given by seed; None if it is not a number."""
        logs = [math.log(a / b) for a, b in zip(without, today, strict=True) if a > 0.0 and b > 0.0]
        if not logs:
            return None
        return cls(math.exp(statistics.fmean(logs)), all(x > 0.0 for x in logs) or all(x < 0.0 for x in logs))


Effects = dict[str, Effect]
"""Effects by the name of the figure."""


def effects(without: Sequence[Seen], today: Sequence[Seen]) -> Effects:
    """Every figure without the rule over that with it."""
    found = {name: Effect.of(*([getattr(s, name) for s in seen] for seen in (without, today))) for name in LETTERS}
    return {name: effect for name, effect in found.items() if effect is not None}


class Case(NamedTuple):
    """Case in which a rule was taken out."""

    loop: str
    profile: str
    load: str

    def __str__(self) -> str:
        return f"{self.load}, {short_name(self.profile)}" + ("" if self.loop == OVERLAP else f", {self.loop} loop")


def short_name(profile: str) -> str:
    """Return the short name of a profile, for tables."""
    return profile.removeprefix("h200-qwen3-")


def simulated(load: Load, profile: Profile, rule: Rule | None, *, loop: str, seed: int, times: int) -> Seen:
    """One simulation, without `rule` if there is one. `times`: so many times the requests."""
    seen_as = load.profile(profile)
    stream = load.make(seen_as, times * load.requests, seed)
    knobs = rule.knobs if rule else {}
    with rule.taken_out() if rule else nullcontext():
        outcome = run(
            VARIANTS["laps"], stream, seen_as, chunk=None if load.kind == "group" else CHUNK, knobs=knobs,
            overlap=loop == OVERLAP, seed=seed, memory=load.memory, servers=load.servers, router="pools",
            alloc=AllocConfig(**rule.alloc) if rule else None,
        )  # fmt: skip
    return Seen.of(outcome, load)


Found = dict[str, dict[Case, Effects]]
"""By the name of the rule."""


def cell(by: Effects) -> str:
    """Return the ratios that moved, as text."""
    return " ".join(f"{LETTERS[name]} {effect.ratio:.2f}" for name, effect in by.items() if effect.moved)


def largest(cases: Mapping[Case, Effects]) -> tuple[Case, str, Effect] | None:
    """(Where, figure, effect) that moved most; None where nothing did."""
    moved = [(c, name, e) for c, by in cases.items() for name, e in by.items() if e.moved]
    return max(moved, key=lambda one: abs(math.log(one[2].ratio)), default=None)


def summary(found: Found, rules: Sequence[Rule]) -> Table:
    """A line for each rule."""
    rows = []
    for rule in rules:
        cases = found[rule.name]
        top = largest(cases)
        said = "none" if top is None else f"{HEADS[top[1]]} x {top[2].ratio:.2f}, {top[0]}"
        moved = sum(any(e.moved for e in by.values()) for by in cases.values())
        rows.append((rule.name, rule.instead, said, f"{moved} of {len(cases)}", rule.bound))
    heads = ("rule", "without it", "largest effect of taking it out", "cases with an effect", "promise that needs it")
    return Table("What each rule is worth", heads, rows)


def matrix(found: Found, rules: Sequence[Rule], loop: str, profile: str) -> Table:
    """Table of the ratios that moved in each case of one profile in one loop."""
    loads = list(dict.fromkeys(c.load for cases in found.values() for c in cases))
    rows = []
    for rule in rules:
        by = {c.load: effects for c, effects in found[rule.name].items() if (c.loop, c.profile) == (loop, profile)}
        rows.append((rule.name, *(cell(by[load]) if load in by else "-" for load in loads)))
    note = (
        "S short P90, L long P90, M mean TTFT, D mean slowdown, R requests/s, T share in time: without the rule over "
        f"with it, where that moved by more than {MOVED:.0%} and all seeds agree on the direction."
    )
    return Table(f"{profile}, {loop} loop", ("", *loads), rows, note)


def today_table(today: Mapping[Case, Sequence[Seen]], loop: str, profile: str) -> Table:
    """The figures themselves, means over seeds."""
    rows = []
    for case, seen in today.items():
        if (case.loop, case.profile) == (loop, profile):
            mean = {name: statistics.fmean(getattr(s, name) for s in seen) for name in LETTERS}
            times = (f"{1e3 * mean[name]:.0f}" for name in ("short_p90_s", "long_p90_s", "mean_s"))
            in_time = f"{mean['in_time']:.1%}"
            rows.append((case.load, *times, f"{mean['slowdown']:.2f}", f"{mean['requests_per_s']:.1f}", in_time))
    heads = ("", "short P90 ms", "long P90 ms", "mean TTFT ms", "mean slowdown", "requests/s", "in time")
    rows = [tuple("-" if x.startswith("nan") else x for x in row) for row in rows]
    return Table(f"With all rules: {profile}, {loop} loop", heads, rows)


def study(
    rules: Sequence[Rule],
    loads: Iterable[str],
    profiles: Iterable[str],
    seeds: Sequence[int],
    times: int,
    say: Progress,
) -> tuple[Found, dict[Case, list[Seen]]]:
    """(Effects of each rule, the figures with all rules.)"""
    found: Found = {rule.name: {} for rule in rules}
    today: dict[Case, list[Seen]] = {}
    cases = [
        Case(loop, p, load)
        for load in loads
        for loop, p in PLACES[LOADS[load].kind]
        if p in profiles and any(rule.kind == LOADS[load].kind for rule in rules)
    ]
    for case in cases:
        load, profile = LOADS[case.load], Profile.load(case.profile)

        def seen(rule: Rule | None, case: Case = case, load: Load = load, profile: Profile = profile) -> list[Seen]:
            return [simulated(load, profile, rule, loop=case.loop, seed=s, times=times) for s in seeds]

        today[case] = seen(None)
        for rule in rules:
            if rule.kind == load.kind and (load.deadlines or not rule.deadlines):
                found[rule.name][case] = effects(seen(rule), today[case])
        say(str(case))
    return found, today


def raw(found: Found, today: Mapping[Case, Sequence[Seen]]) -> dict[str, Any]:
    """For the piece (JSON-ready)."""
    return {
        "effects": {
            rule: [{**case._asdict(), **{name: [e.ratio, e.agreed] for name, e in by.items()}}
                   for case, by in cases.items()]
            for rule, cases in found.items()
        },
        "today": [
            {**case._asdict(), "seeds": [{k: None if math.isnan(v) else v for k, v in asdict(s).items()} for s in seen]}
            for case, seen in today.items()
        ],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.sim.rules", __doc__, "rules", seed=FIRST_SEED, whole=True)
    p.add_argument("--rules", nargs="+", choices=[r.name for r in ALL], default=[r.name for r in ALL])
    p.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    p.add_argument("--profiles", nargs="+", choices=(*PROFILES, GROUP), default=(*PROFILES, GROUP))
    p.add_argument("--seeds", type=count, default=3, help="how many, from --seed on (3)")
    p.add_argument("--times", type=count, default=1, help="so many times the requests")
    args = p.parse_args(argv)
    rules = [r for r in ALL if r.name in args.rules]
    found, today = study(
        rules, args.loads, args.profiles, range(args.seed, args.seed + args.seeds), args.times, Progress()
    )
    text = (
        "Each line is the policy without one of its rules, on the same arrivals. "
        f'{args.seeds} seeds; the overlap loop on all profiles, the normal one on {short_name(PROFILES[0])}. "Near" '
        f'clients are back within a millisecond; "tight": memory runs out; "ranks": eight data-parallel ranks '
        f'that plan together; "fleet": {SERVERS} servers behind the router. There is no host time per slice: which '
        "batches are too small for slices is not in it."
    )
    piece = Piece("sim-rules", "What each rule is worth", text, args.seed)
    where = list(dict.fromkeys((c.loop, c.profile) for c in today))
    piece.tables = [
        summary(found, rules), *(matrix(found, rules, *w) for w in where), *(today_table(today, *w) for w in where)
    ]  # fmt: skip
    ratios = [s.littles_ratio for seen in today.values() for s in seen if not math.isnan(s.littles_ratio)]
    if ratios:
        worst = max(ratios, key=lambda x: abs(x - 1.0))
        met = abs(worst - 1.0) <= OFF
        piece.figures.append(Figure("Little's ratio furthest from 1", worst, f"within {OFF:.0%} of 1", met))
    for rule in rules:
        if (top := largest(found[rule.name])) is not None:
            piece.figures.append(Figure(f"{rule.name}: {HEADS[top[1]]} without it, {top[0]}", top[2].ratio))
    piece.data = raw(found, today)
    piece.leave(args.out, "benchmark.sim.rules", argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
