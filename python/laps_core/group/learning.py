"""Learning of a group's terms from its steps: own part and experts are separated by which rank was the slowest."""

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
from laps_core.latency.fits import Fitted
from laps_core.latency.nnls import robust_nnls
from laps_core.latency.strata import Strata

MIN_SAMPLES = 32
"""Least number of steps for a fit."""
MOST_SAMPLES = 512
"""Most steps used for a fit."""
REFIT_EVERY = 16
FIRST_SAMPLES = 4
"""Steps from which on a guess is stretched to the times measured."""
LATELY = 16
"""Ratios of measured to guessed times that are kept for that."""
_FLATS = ((0, 0), (256, 2048), (256, 0), (0, 2048))
"""First guesses for the reach of the floors: tokens of a rank, tokens that experts see."""
_ANCHORS = ((64, 0), (512, 0), (2048, 0), (8192, 0), (256, 30_000), (2048, 90_000))
"""New and history tokens of a rank."""
_ROUNDS = 4
_CLEARLY = 0.9
"""Share of the error without floors that a fit with floors must stay below."""

Array = npt.NDArray[np.float64]


class GroupSample(NamedTuple):
    """One measured step of a group."""

    shapes: tuple[OwnShape, ...]
    """The batch of each rank."""
    seconds: float
    """Time from launch to launch, or to the step's end if nothing followed."""


class GroupModel(Fitted["GroupCost | None"]):
    """Learns the terms of a group's step online; keeps a bounded number of steps of each kind.

    The terms decide which rank was the slowest and whether a floor applied, and these decide the terms: a few rounds of
    non-negative least squares settle both.
    """

    def __init__(self, start: GroupCost, *, guess: bool = False) -> None:
        """``start``: initial cost, no time of which is 0; ranks, padding and paths of attention never change. Stretched
        to the times measured it stands in for steps that have not come yet. ``guess``: only the proportions of its
        terms are used, and ``cost`` is so stretched until there is a fit."""
        super().__init__()
        self.cost = start
        self._start, self._guess = start, guess
        self._ratios: deque[float] = deque(maxlen=LATELY)
        self.fitted = False
        self.observed = 0
        """Steps taken in since the start."""
        self._strata: Strata[GroupSample] = Strata()
        self._refit_at = MIN_SAMPLES

    @property
    def ready(self) -> bool:
        """Return True if ``cost`` predicts times: it was given or fitted, or a guess was stretched."""
        return self.fitted or not self._guess or len(self._ratios) >= FIRST_SAMPLES

    def observe(self, sample: GroupSample) -> None:
        """Take in one step, and refit after enough new ones. Invalid steps are ignored: a time that is not positive, no
        tokens, another number of ranks, negative numbers."""
        self.settle()
        shapes, seconds = sample
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
        self._strata.add(seen, sample)
        if self.observed >= self._refit_at:
            self._refit_at = self.observed + max(REFIT_EVERY, self.observed // 4)
            self.fit()

    def fit(self) -> None:
        """Start a fit; steps that do not allow one leave the terms as they are."""
        samples = self._strata.samples()
        if len(samples) >= MIN_SAMPLES:
            kept = samples[:: -(-len(samples) // MOST_SAMPLES)]
            self._make(learn, kept, self.cost, anchors(self._start.stretched(median(self._ratios))))

    def _take(self, found: GroupCost | None) -> None:
        if found is not None:
            self.cost, self.fitted = found, True


def proportions(ranks: int) -> GroupCost:
    """Return a cost whose terms are in proportion for a large model with experts: DeepSeek-V3 on an H200 for each
    rank."""
    return GroupCost(
        ranks=ranks, fixed=0.012, token=6.3e-5, alpha=3.95e-9, unpack=4.4e-6, own_floor=0.015, expert=9.45e-6,
        expert_floor=0.027,
    )  # fmt: skip


def anchors(cost: GroupCost) -> list[GroupSample]:
    """Return steps as ``cost`` predicts them: small and large batches on one rank and on all, with and without
    histories."""
    idle = OwnShape(0, 0, 0, 0)
    batches = [cost.shape([shape]) for shape in _ANCHORS]
    steps = [(b, *[others] * (cost.ranks - 1)) for b in batches for others in (idle, b)]
    return [GroupSample(shapes, cost.seconds(shapes)) for shapes in steps]


def learn(samples: Sequence[GroupSample], known: GroupCost, held: Sequence[GroupSample] = ()) -> GroupCost | None:
    """Return the terms with the least relative error over these steps; None if the steps are too alike.

    ``known``: first guess, which decides the slowest rank. ``held``: further steps, not measured, which hold the terms
    that the measured ones say nothing about.
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
            off = np.abs(np.array([cost.seconds(sample.shapes) for sample in samples]) / seconds - 1.0)
            error = float(np.minimum(off, 0.5).mean())
            # The first guess has no floors: the simpler model stays unless others are clearly better.
            if error < least * (_CLEARLY if best is not None and (own_flat or expert_flat) else 1.0):
                best, least = cost, error
    return best


def _floors(cost: GroupCost, own_flat: int, expert_flat: int) -> GroupCost:
    """Return ``cost`` with floors that reach up to these tokens."""
    token, expert = cost.token or 1e-9, cost.expert or 1e-9
    return replace(cost, token=token, expert=expert, own_floor=token * own_flat, expert_floor=expert * expert_flat)


def _solve(samples: Sequence[GroupSample], seconds: Array, cost: GroupCost) -> GroupCost:
    """Return the terms, with the slowest rank and the floors of each step taken from ``cost``."""
    rows = []
    for shapes, _ in samples:
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
