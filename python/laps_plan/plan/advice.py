"""Recommendation: flags that gain more than chance, and LAPS only if no stock policy is as good."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from laps_plan.plan.figures import Change
from laps_plan.plan.setup import LAPS, STOCK, Question, Setup, setups_to_compare
from laps_plan.plan.trials import Trials

GAIN = 0.95
"""A ratio is a gain if its whole confidence interval is at most this."""
IN_TIME_GAIN = 0.01
"""A rise of the share in time is a gain if its whole confidence interval is at least this."""
HARM = 1.05
"""Largest ratio that a flag may cause in any figure, and LAPS in the short P90 and the mean TTFT."""
LONG_HARM = 1.5
"""Largest ratio that LAPS may cause in the P90 of long requests."""
RULE = (
    f"LAPS is recommended where, against each stock policy, the P90 of short requests or the mean TTFT is at least "
    f"{1 - GAIN:.0%} lower beyond chance (95% interval over parts of the traffic), neither of the two is more than "
    f"{HARM - 1:.0%} higher, the P90 of long requests is at most {LONG_HARM:g} times as high, and the share in time "
    f"not more than {IN_TIME_GAIN:.0%} lower."
)
PAYS, TRADE, SAME, WORSE = "pays", "a trade", "no difference", "worse"
TUNED = "laps, tuned"
CHUNKS = (2048, 4096, 8192)
RANK_CHUNKS = (512, 1024, 2048, 4096, 8192)
"""Chunks that are tried for each data-parallel attention rank (tokens)."""
TRIED: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "waiting window": (("none", {"wait_window_ms": 0.0}), ("20 ms", {"wait_window_ms": 20.0})),
    "guard": (("0.1", {"guard": 0.1}), ("0.5", {"guard": 0.5})),
    "preemption overhead": (("0.08", {"preempt_overhead": 0.08}), ("0.3", {"preempt_overhead": 0.3})),
    "threshold": (
        ("128", {"length_threshold": 128}),
        ("512", {"length_threshold": 512}),
        ("1024", {"length_threshold": 1024}),
        ("auto", {"length_threshold": "auto"}),
    ),
}
"""Values of LAPS's flags that are tried in addition to the defaults."""


@dataclass(frozen=True)
class Trial:
    """One flag with another value than its default, all other flags unchanged."""

    flag: str
    value: str
    setup: Setup
    change: Change
    """Figures of ``setup`` relative to those of the default."""

    @property
    def verdict(self) -> str:
        """Return the verdict on the flag: PAYS, TRADE, SAME or WORSE."""
        if not gains(self.change):
            return WORSE if harms(self.change) else SAME
        return TRADE if harms(self.change) else PAYS


@dataclass(frozen=True)
class Advice:
    """Setup to run, and the reasons."""

    laps: Setup
    """LAPS with the flags that pay, or with its defaults."""
    stock: Setup
    """Best stock policy, with its best chunk size."""
    recommended: bool
    """True if LAPS is recommended; False if ``stock`` is as good."""
    setups: list[Setup]
    """All setups that are compared on the whole traffic."""
    against: dict[str, Change]
    """Figures of ``laps`` relative to each other setup, by name; basis of the tables and the verdict."""
    trials: list[Trial]

    @property
    def setup(self) -> Setup:
        return self.laps if self.recommended else self.stock


def gains(change: Change) -> bool:
    """Return True if short P90, mean TTFT or share in time is better by GAIN or IN_TIME_GAIN, beyond chance."""
    faster = any(change.ratios[name].high <= GAIN for name in ("short P90", "mean TTFT") if name in change.ratios)
    return faster or (change.in_time is not None and change.in_time.low >= IN_TIME_GAIN)


def harms(change: Change) -> bool:
    """Return True if a figure is worse by more than a flag may cause, beyond chance."""
    slower = any(ratio.middle > HARM and ratio.low > 1.0 for ratio in change.ratios.values())
    return slower or (change.in_time is not None and change.in_time.high < -IN_TIME_GAIN)


def laps_beats_stock(change: Change) -> bool:
    """Return True if LAPS is better than a stock policy according to RULE."""
    limits = {"short P90": HARM, "mean TTFT": HARM, "long P90": LONG_HARM}
    slower = any(ratio.middle > limits[name] for name, ratio in change.ratios.items())
    later = change.in_time is not None and change.in_time.middle < -IN_TIME_GAIN
    return gains(change) and not slower and not later


def variations(question: Question) -> Iterator[tuple[str, str, Setup]]:
    """Yield (flag, value, setup) of LAPS, each with one change from the defaults."""
    base = question.setup(LAPS)
    if question.ranks > 1:
        # The joint plan of all ranks sizes its own steps, and has neither a window nor a threshold.
        yield from (("guard", value, base.with_changes(**knobs)) for value, knobs in TRIED["guard"])
        yield "slices", "none", base.with_changes(slice_ms=0.0)
        return
    for chunk in CHUNKS:
        if chunk != question.chunk:
            yield "chunk", str(chunk), base.with_changes(chunk=chunk)
    for flag, values in TRIED.items():
        for value, knobs in values:
            yield flag, value, base.with_changes(**knobs)
    if question.servers > 1:
        yield "pools", "two", base.with_changes(pools=True)


def max_simulations(question: Question) -> int:
    """Return the maximum number of simulations of all stretches that ``advise`` makes."""
    return len(list(variations(question))) + 2 + len(STOCK) * (1 + len(chunks(question)))


def chunks(question: Question) -> tuple[int, ...]:
    """Return the values of ``--chunked-prefill-size`` with which stock policies are tried."""
    return CHUNKS if question.ranks == 1 else tuple(question.ranks * each for each in RANK_CHUNKS)


def advise(trials: Trials) -> Advice:
    """Return the recommendation. Small searches on stretches propose flags: one at a time, then the paying flags
    together. The whole traffic decides."""
    question = trials.question
    base = question.setup(LAPS)
    figures = trials.stretches(base)
    tried = [
        Trial(flag, value, setup, Change.of(trials.stretches(setup), figures))
        for flag, value, setup in variations(question)
    ]
    tuned = combine_paying_flags(trials, base, tried)
    setups = setups_to_compare(question)
    setups += [s for s in (tuned, *(best_chunk(trials, question.setup(name)) for name in STOCK)) if s not in setups]
    stocks = [s for s in setups if s.policy in STOCK]
    for laps in (tuned, base):
        against = {s.name: trials.change(laps, s) for s in setups if s != laps}
        as_good = [s for s in stocks if not laps_beats_stock(against[s.name])]
        if not as_good and (laps == base or not harms(against[base.name])):
            break
    stock = min(as_good or stocks, key=lambda s: trials.whole(s).mean_s)
    return Advice(laps, stock, not as_good, setups, against, tried)


def best_chunk(trials: Trials, setup: Setup) -> Setup:
    """Return a stock policy with the best chunk that pays against the default chunk, else with the default chunk."""
    default = trials.stretches(setup)
    others = [
        setup.with_changes(f"{setup.policy}, chunk {c}", chunk=c) for c in chunks(trials.question) if c != setup.chunk
    ]
    paying = [s for s in others if gains(c := Change.of(trials.stretches(s), default)) and not harms(c)]
    return min(paying, key=lambda s: mean(trials, s), default=setup)


def combine_paying_flags(trials: Trials, base: Setup, tried: list[Trial]) -> Setup:
    """Return LAPS with the best paying value of each flag, if these pay together; else with the best single value."""
    best: dict[str, Trial] = {}
    for trial in sorted(tried, key=lambda trial: mean(trials, trial.setup)):
        if trial.verdict == PAYS:
            best.setdefault(trial.flag, trial)
    if not best:
        return base
    setup = base
    for trial in best.values():
        own = {"chunk": trial.setup.chunk} if trial.flag == "chunk" else dict(trial.setup.knobs)
        setup = setup.with_changes(TUNED, **own, **({"pools": True} if trial.setup.pools else {}))
    change = Change.of(trials.stretches(setup), trials.stretches(base))
    alone = min((t.setup for t in best.values()), key=lambda s: mean(trials, s))
    if gains(change) and not harms(change) and mean(trials, setup) <= mean(trials, alone):
        return setup
    return alone.with_changes(TUNED)


def mean(trials: Trials, setup: Setup) -> float:
    """Return the mean TTFT over the stretches (seconds)."""
    found = trials.stretches(setup)
    return sum(f.mean_s for f in found) / len(found)
