"""Learning of a group's terms from its steps. Knowing each step's slowest rank separates own part and experts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from laps_core.group.cost import GroupCost, OwnShape
from laps_core.latency.fits import Fitted, Learned, clearly_better, mean_error, scramble
from laps_core.latency.nnls import robust_nnls
from laps_core.latency.strata import Strata

MIN_SAMPLES = 32
"""Least number of steps for a fit."""
MOST_SAMPLES = 512
"""Most steps used for a fit."""
REFIT_EVERY = 16
REFIT_AT_MOST_EVERY = 512
RECENT = 256
"""The last ``RECENT`` steps outdate all older ones if a fit to them is clearly better."""
FIRST_SAMPLES = 4
"""Measured steps after which a stretched guess is good enough to plan with."""
LATELY = 16
"""Latest ratios of measured to initial times; their median stretches the initial cost."""
_FLATS = ((0, 0), (256, 2048), (256, 0), (0, 2048))
"""First guesses for how far the floors reach: tokens of a rank, tokens that the experts process."""
_ANCHORS = ((64, 0), (512, 0), (2048, 0), (8192, 0), (256, 30_000), (2048, 90_000))
"""New and history tokens of a rank."""
_ROUNDS = 4
_CLEARLY = 0.9
"""A fit with floors must have less than this share of the error of the best fit so far, which starts without floors."""

Array = npt.NDArray[np.float64]


class GroupSample(NamedTuple):
    """One measured step of a group."""

    shapes: tuple[OwnShape, ...]
    """The batch of each rank."""
    seconds: float
    """Time from launch to launch, or to the step's end if nothing followed."""
    number: int = 0
    """Number of the step since the start of the server."""


class GroupModel(Fitted[Learned[GroupCost | None]]):
    """Learns the terms of a group's step online; keeps a bounded number of steps of each kind, and forgets older steps
    if the devices become slower or faster.

    The terms decide which rank was the slowest and which floors applied; slowest ranks and floors decide the terms. So
    a fit alternates between both, in a few rounds of non-negative least squares.
    """

    def __init__(self, start: GroupCost, *, guess: bool = False) -> None:
        """``start``: initial cost, which must predict more than 0 s for every step; its ranks, padding and paths of
        attention never change. Stretched to the measured times, it stands in for kinds of steps that have not run yet.
        ``guess``: only the proportions of its terms are right; until the first fit, ``cost`` is ``start`` stretched."""
        super().__init__()
        self.cost = start
        self._start, self._guess = start, guess
        self._ratios: deque[float] = deque(maxlen=LATELY)
        self.fitted = False
        self.observed = 0
        """Valid steps observed since the start."""
        self._strata: Strata[GroupSample] = Strata()
        self._refit_at = MIN_SAMPLES

    @property
    def ready(self) -> bool:
        """Return True if ``cost`` can predict times: it was known from the start, is fitted, or is a guess stretched to
        FIRST_SAMPLES steps."""
        return self.fitted or not self._guess or len(self._ratios) >= FIRST_SAMPLES

    def observe(self, sample: GroupSample) -> None:
        """Add one measured step, and refit after enough new steps. Ignores invalid steps: a time that is not positive
        or not finite, no tokens, a different number of ranks, negative numbers."""
        self.settle()
        shapes, seconds = sample.shapes, sample.seconds
        if not 0.0 < seconds < math.inf or len(shapes) != self.cost.ranks:
            return
        if min(map(min, shapes)) < 0 or not (tokens := sum(s.tokens for s in shapes)):
            return
        self.observed += 1
        self._ratios.append(seconds / self._start.seconds(shapes))
        if self._guess and not self.fitted:
            self.cost = self._start.stretched(median(self._ratios))
        slowest = max(shapes, key=lambda s: (self.cost.own_s(s.tokens, self.cost.shape_s(s)), s))
        seen = slowest.tokens.bit_length(), tokens.bit_length(), (slowest.history + slowest.absorbed).bit_length() // 4
        self._strata.add(seen, sample._replace(number=self.observed))
        if self.observed >= self._refit_at:
            self._refit_at = self.observed + min(max(REFIT_EVERY, self.observed // 4), REFIT_AT_MOST_EVERY)
            self.fit()

    def fit(self) -> None:
        """Start a fit. The terms stay unchanged if the steps do not allow a fit."""
        samples = self._strata.samples()
        if len(samples) >= MIN_SAMPLES:
            held = anchors(self._start.stretched(median(self._ratios)))
            self._make(learn_latest, samples, self.cost, held, self.observed)

    def _take(self, learned: Learned[GroupCost | None]) -> None:
        found, outdated = learned
        if outdated is not None:
            self._strata.keep(lambda s: s.number > outdated)
        if found is not None:
            self.cost, self.fitted = found, True


def proportions(ranks: int) -> GroupCost:
    """Return a cost with the proportions of a large model with experts: DeepSeek-V3 with one H200 for each rank."""
    return GroupCost(
        ranks=ranks, fixed=0.012, token=6.3e-5, alpha=3.95e-9, unpack=4.4e-6, own_floor=0.015, expert=9.45e-6,
        expert_floor=0.027,
    )  # fmt: skip


def anchors(cost: GroupCost) -> list[GroupSample]:
    """Return artificial steps with the times that ``cost`` predicts: small and large batches, with and without
    histories, on one rank and on all ranks."""
    idle = OwnShape(0, 0, 0, 0)
    batches = [cost.shape([shape]) for shape in _ANCHORS]
    steps = [(b, *[others] * (cost.ranks - 1)) for b in batches for others in (idle, b)]
    return [GroupSample(shapes, cost.seconds(shapes)) for shapes in steps]


def learn_latest(
    samples: Sequence[GroupSample], known: GroupCost, held: Sequence[GroupSample], newest: int
) -> Learned[GroupCost | None]:
    """Return the terms learned from these steps, or from the recent ones if these outdate the others; None if the steps
    do not allow a fit. ``newest``: number of the latest step."""
    found = learn(samples[:: -(-len(samples) // MOST_SAMPLES)], known, held)
    outdated = max(0, newest - RECENT)
    recent, judges = list[GroupSample](), list[GroupSample]()
    for s in samples:
        if s.number > outdated:
            (recent if scramble(s.number) % 5 else judges).append(s)
    if found is None or len(recent) + len(judges) < MIN_SAMPLES or not judges:
        return Learned(found)
    newer = clearly_better(found, lambda: learn(recent, known, held), lambda cost: error(cost, judges))
    return Learned(found) if newer is None else Learned(newer, outdated)


def error(cost: GroupCost, samples: Sequence[GroupSample]) -> float:
    """Return the mean relative error of the predicted times."""
    return mean_error([abs(cost.seconds(s.shapes) / s.seconds - 1.0) for s in samples])


def learn(samples: Sequence[GroupSample], known: GroupCost, held: Sequence[GroupSample] = ()) -> GroupCost | None:
    """Return the terms with the least relative error over these steps; None if the steps are too alike, or if no
    solution is found.

    ``known``: first guess, which decides the slowest rank. ``held``: artificial steps, which keep terms near a
    plausible value if the measured steps say nothing about them.
    """
    sizes = {max(s.tokens for s in sample.shapes) for sample in samples}
    if len(sizes) < 3 or max(sizes) < 2 * min(sizes):
        return None
    samples = [*samples, *held]
    seconds = np.array([sample.seconds for sample in samples])
    best, least = None, math.inf
    for own_flat, expert_flat in _FLATS:
        cost = _floors(known, own_flat, expert_flat)
        for _ in range(_ROUNDS):
            try:
                cost = _solve(samples, seconds, cost)
            except RuntimeError:
                break
            off = error(cost, samples)
            # The first guess has no floors: this simpler model stays unless a model with floors is clearly better.
            if off < least * (_CLEARLY if best is not None and (own_flat or expert_flat) else 1.0):
                best, least = cost, off
    return best


def _floors(cost: GroupCost, own_flat: int, expert_flat: int) -> GroupCost:
    """Return ``cost`` with floors as long as the work of this many tokens."""
    token, expert = cost.token or 1e-9, cost.expert or 1e-9
    return replace(cost, token=token, expert=expert, own_floor=token * own_flat, expert_floor=expert * expert_flat)


def _solve(samples: Sequence[GroupSample], seconds: Array, cost: GroupCost) -> GroupCost:
    """Return the fitted terms. ``cost`` decides the slowest rank of each step, and which floors apply."""
    rows = []
    for shapes, *_ in samples:
        own = max(shapes, key=lambda s: (cost.own_s(s.tokens, cost.shape_s(s)), s))
        tokens = [s.tokens for s in shapes]
        seen = cost.ranks * max(tokens) if cost.padded else sum(tokens)
        own_low = cost.token * own.tokens + cost.shape_s(own) <= cost.own_floor
        expert_low = cost.expert * seen <= cost.expert_floor
        part = (0, 0, 0, 0) if own_low else own
        rows.append((1.0, part[0], 0.0 if expert_low else seen, *part[1:], float(own_low), float(expert_low)))
    found = robust_nnls(np.array(rows, dtype=float), seconds).tolist()
    fixed, token, expert, alpha, unpack, absorbed, own_floor, expert_floor = found
    return replace(
        cost, fixed=fixed, token=token, expert=expert, alpha=alpha, unpack=unpack, own_floor=own_floor,
        expert_floor=expert_floor, absorbed=None if cost.absorbed is None else absorbed or cost.absorbed,
    )  # fmt: skip
