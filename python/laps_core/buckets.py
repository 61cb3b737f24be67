"""The (L, B, N) grid of prefill CUDA-graph cells: which exist, which serves a batch, and what it wastes.

A *cell* is one captured graph. Requests are packed end to end, so a cell pads the total and the request slots, never
each request [L s3.1 pads each to L]. Lengths, totals and padding are in tokens, times in seconds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Requests = Sequence[tuple[int, int]]
"""(new tokens, history tokens) of each request in a batch."""

Predict = Callable[[Requests], "float | None"]
"""Seconds the stock path takes for a batch; None while that is not known."""

STRATEGIES = ("latency", "memory")
"""latency: least predicted time. memory: least padding [L s3.1]."""


@dataclass(frozen=True, order=True)
class Cell:
    """One graph: up to ``batch`` requests of up to ``length`` new tokens each, in ``tokens`` packed rows."""

    tokens: int
    length: int
    batch: int

    def covers(self, batch: Batch) -> bool:
        """Whether every request has a slot and a row for each new token."""
        return batch.tokens <= self.tokens and batch.longest <= self.length and batch.count <= self.batch

    def __str__(self) -> str:
        return f"{self.length}x{self.batch}/{self.tokens}"


@dataclass(frozen=True)
class Batch:
    """A batch as the grid sees it. ``requests``: (new, history) tokens of each."""

    requests: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: Iterable[int], histories: Iterable[int] | None = None) -> Batch:
        """From new tokens and history tokens per request (no history if left out)."""
        new = tuple(lengths)
        old = tuple(histories) if histories is not None else (0,) * len(new)
        return cls(tuple(zip(new, old, strict=True)))

    @cached_property
    def count(self) -> int:
        """Requests."""
        return len(self.requests)

    @cached_property
    def tokens(self) -> int:
        """New tokens in all."""
        return sum(new for new, _ in self.requests)

    @cached_property
    def longest(self) -> int:
        """New tokens of the longest request."""
        return max((new for new, _ in self.requests), default=0)

    @cached_property
    def history(self) -> int:
        """History tokens in all."""
        return sum(old for _, old in self.requests)

    def padded(self, cell: Cell) -> Requests:
        """The work a replay of ``cell`` does: the batch, and its tail as rows without history."""
        tail = cell.tokens - self.tokens
        return (*self.requests, (tail, 0)) if tail > 0 else self.requests


# -- the grid


def ladder(high: int, *, pad_max: float, granule: int) -> list[int]:
    """Token levels up to ``high``: multiples of ``granule``, as few as keep padding within ``allowed``.

    A batch of t tokens goes to the first level N >= t; then N - t <= allowed(N).
    """
    levels: list[int] = []
    low = 1
    top = _ceil(high, granule)
    while low <= top:
        level = _ceil(low, granule)
        while level < top and level + granule - low <= allowed(level + granule, pad_max=pad_max, granule=granule):
            level += granule
        levels.append(level)
        low = level + 1
    return levels


def allowed(tokens: int, *, pad_max: float, granule: int) -> int:
    """Most padding a replay of ``tokens`` rows may carry: a share ``pad_max`` of them, or one short granule."""
    return max(granule - 1, int(pad_max * tokens))


def grid(
    lengths: Iterable[int], batches: Iterable[int], *, pad_max: float, granule: int = 8, max_tokens: int
) -> list[Cell]:
    """Every cell some batch needs, smallest first.

    A batch belongs to (L, B) when its longest request rounds up to L and its count to B, so it has at least
    L' + 1 + B' tokens (L', B' the next smaller values) and at most L * B; levels outside that are dropped, and so is
    all beyond ``max_tokens``.
    """
    ls, bs = sorted(set(lengths)), sorted(set(batches))
    if not ls or not bs:
        return []
    levels = ladder(min(ls[-1] * bs[-1], max_tokens), pad_max=pad_max, granule=granule)
    cells: list[Cell] = []
    for below_l, length in zip([0, *ls], ls, strict=False):
        for below_b, batch in zip([0, *bs], bs, strict=False):
            least, most = below_l + 1 + below_b, min(length * batch, max_tokens)
            below = 0
            for level in levels:
                # The last level may overshoot what L * B rows can ever hold.
                top = min(level, _ceil(most, granule))
                if level >= least and below < most:
                    cells.append(Cell(top, length, batch))
                below = level
    return sorted(set(cells))


def _ceil(value: int, granule: int) -> int:
    return -(-value // granule) * granule


# -- which cells are worth capturing


@dataclass(frozen=True)
class Budget:
    """What capture may cost: graphs, seconds, MiB of device memory."""

    graphs: int
    seconds: float
    mib: float

    def allows(self, graphs: int, seconds: float, mib: float) -> bool:
        """Whether one more graph may be captured after this much was spent, if it costs what the mean one did."""
        each_s, each_mib = (seconds / graphs, mib / graphs) if graphs else (0.0, 0.0)
        return graphs < self.graphs and seconds + each_s <= self.seconds and mib + each_mib <= self.mib


KNEE_TOKENS = 256
"""Where prefill turns from memory- to compute-bound; below it padded rows are nearly free [L s2.1]."""

LAUNCH_TOKENS = 256
"""Prior for what a replay saves (launches), in rows; measured times take its place once there are any."""


def prior_saving(batch: Batch, cell: Cell) -> float:
    """Rows a replay is expected to save before anything was measured; negative when padding costs more."""
    saved = LAUNCH_TOKENS / (1 + batch.tokens / KNEE_TOKENS)
    # Attention is launched for L and for every slot: little, but a tighter cell wins where rows are equal.
    spare = (cell.length - batch.longest) / 32 + (cell.batch - batch.count) / 8
    return saved - spare - max(0, cell.tokens - max(batch.tokens, KNEE_TOKENS))


def expected_batches(lengths: Sequence[int], batches: Sequence[int], count: int = 1024, seed: int = 0) -> list[Batch]:
    """Batches to rank cells by before traffic was seen: sizes and lengths log-uniform over the grid's range."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(0.0, math.log(max(batches) + 1), count)).astype(int)
    top = math.log(max(lengths) + 1)
    return [Batch.of(np.exp(rng.uniform(0.0, top, max(1, int(n)))).astype(int).tolist()) for n in sizes]


def rank(
    cells: Sequence[Cell],
    batches: Sequence[Batch],
    *,
    pad_max: float,
    granule: int = 8,
    count: int,
    have: Sequence[Cell] = (),
    least: float = 0.0,
    saving: Callable[[Batch, Cell], float] = prior_saving,
) -> list[Cell]:
    """Up to ``count`` cells, most valuable first: each judged by what it saves beyond ``have`` and those before it.

    Cells that save no more than ``least`` (in the unit of ``saving``, over all batches) are left out.
    Cost: len(cells) * len(batches) calls of ``saving``.
    """
    if not cells or not batches:
        return []
    gains = np.stack([_gains(c, batches, saving, pad_max, granule) for c in cells])
    best: NDArray[np.float64] = np.zeros(len(batches))
    for c in have:
        best = np.maximum(best, _gains(c, batches, saving, pad_max, granule))
    order: list[Cell] = []
    while len(order) < count:
        more = np.maximum(gains - best, 0.0).sum(axis=1)
        # Ties go to the later, larger cell: it covers what the smaller one does.
        at = len(cells) - 1 - int(np.argmax(more[::-1]))
        if more[at] <= least:
            break
        order.append(cells[at])
        best = np.maximum(best, gains[at])
    return order


def _gains(
    cell: Cell,
    batches: Sequence[Batch],
    saving: Callable[[Batch, Cell], float],
    pad_max: float,
    granule: int,
) -> NDArray[np.float64]:
    room = allowed(cell.tokens, pad_max=pad_max, granule=granule)
    return np.array(
        [max(0.0, saving(b, cell)) if cell.covers(b) and cell.tokens - b.tokens <= room else 0.0 for b in batches]
    )


# -- which cell serves a batch


CellTime = Callable[[Cell, Batch], "float | None"]
"""Seconds a replay of a cell takes for a batch; None while that is not known."""


@dataclass(frozen=True)
class Part:
    """What is launched at once. ``members``: its positions in the batch; ``cell`` None: the stock path."""

    members: tuple[int, ...]
    cell: Cell | None
    tokens: int
    seconds: float | None

    @property
    def waste(self) -> int:
        """Padded rows (tokens)."""
        return self.cell.tokens - self.tokens if self.cell else 0


@dataclass(frozen=True)
class Split:
    """How a batch is cut. Each request is in exactly one part."""

    parts: tuple[Part, ...]

    @property
    def waste(self) -> int:
        """Padded rows in all (tokens). They write to the KV sink, so no KV slot is lost to them."""
        return sum(p.waste for p in self.parts)

    @property
    def share(self) -> float:
        """Padded rows by all rows (0..1)."""
        rows = sum(p.tokens for p in self.parts) + self.waste
        return self.waste / rows if rows else 0.0

    @property
    def seconds(self) -> float | None:
        """Predicted time of all launches; None when any is not known."""
        total = 0.0
        for p in self.parts:
            if p.seconds is None:
                return None
            total += p.seconds
        return total


class Buckets:
    """The captured cells. ``nearest`` and ``split`` never leave the padding bound of ``allowed``."""

    def __init__(self, cells: Iterable[Cell], *, pad_max: float, granule: int = 8) -> None:
        self.cells = sorted(set(cells))
        self._pad_max = pad_max
        self._granule = granule

    def replace(self, old: Cell | None, new: Cell | None) -> None:
        """Take ``old`` out and ``new`` in. Raises ValueError if ``old`` is not here."""
        if old is not None:
            self.cells.remove(old)
        if new is not None:
            self.cells = sorted({*self.cells, new})

    def covering(self, batch: Batch) -> list[Cell]:
        """Cells that cover the batch within the padding bound, least rows first."""
        if not batch.count:
            return []
        found = []
        for cell in itertools.islice(self.cells, bisect.bisect_left(self.cells, Cell(batch.tokens, 0, 0)), None):
            # ``allowed`` grows slower than the rows do, so beyond the bound nothing fits any more.
            if cell.tokens - batch.tokens > allowed(cell.tokens, pad_max=self._pad_max, granule=self._granule):
                break
            if cell.covers(batch):
                found.append(cell)
        return found

    def nearest(self, batch: Batch, time: CellTime | None = None) -> Cell | None:
        """The covering cell with the least predicted time, or None if no cell covers the batch.

        Cells of unknown time come last; equals, and all without ``time``, by fewest rows, then least L, then least B.
        """
        found = self.covering(batch)
        if not found or time is None:
            return found[0] if found else None
        return min(found, key=lambda c: _known(time(c, batch)))

    def split(
        self,
        batch: Batch,
        strategy: str = "latency",
        *,
        time: CellTime | None = None,
        stock: Predict | None = None,
    ) -> Split:
        """Cut the batch along the grid's lengths into at most one launch per length and ``max B`` requests.

        ``latency`` takes the cut of least predicted time (unknown times: fewest launches), ``memory`` that of least
        padding; equals by the other measure, then by fewest launches. Raises ValueError on another strategy.
        """
        if strategy not in STRATEGIES:
            raise ValueError(f"graph strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
        groups = self._by_length(batch)
        if not groups:
            return Split(())
        pieces = {
            (i, j): self._launches(batch, sorted(itertools.chain(*groups[i:j])), time, stock)
            for i in range(len(groups))
            for j in range(i + 1, len(groups) + 1)
        }
        cuts = []
        for inner in _subsets(range(1, len(groups))):
            edges = [0, *inner, len(groups)]
            cuts.append(Split(tuple(p for edge in itertools.pairwise(edges) for p in pieces[edge])))

        def cost(cut: Split) -> tuple[float, float, float]:
            # A request no cell takes pads nothing, yet it is what the grid is there to avoid.
            waste = float(cut.waste + sum(len(p.members) for p in cut.parts if p.cell is None))
            launches = float(len(cut.parts))
            seconds = _known(cut.seconds)
            if strategy == "memory":
                return (waste, seconds, launches)
            return (seconds, waste, launches) if math.isfinite(seconds) else (seconds, launches, waste)

        return min(cuts, key=cost)

    def _by_length(self, batch: Batch) -> list[list[int]]:
        """Positions grouped by the grid length they round up to, longest first."""
        lengths = sorted({c.length for c in self.cells})
        groups: dict[float, list[int]] = {}
        for i, (new, _) in enumerate(batch.requests):
            bucket = next((float(v) for v in lengths if v >= new), math.inf)
            groups.setdefault(bucket, []).append(i)
        return [groups[k] for k in sorted(groups, reverse=True)]

    def _launches(self, batch: Batch, members: list[int], time: CellTime | None, stock: Predict | None) -> list[Part]:
        width = max((c.batch for c in self.cells), default=len(members))
        parts = []
        for i in range(0, len(members), width):
            some = members[i : i + width]
            piece = Batch(tuple(batch.requests[m] for m in some))
            cell = self.nearest(piece, time)
            if cell is not None:
                seconds = time(cell, piece) if time else None
            else:
                seconds = stock(piece.requests) if stock else None
            parts.append(Part(tuple(some), cell, piece.tokens, seconds))
        return parts


def _known(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _subsets(items: Iterable[int]) -> Iterable[tuple[int, ...]]:
    pool = list(items)
    return itertools.chain.from_iterable(itertools.combinations(pool, n) for n in range(len(pool) + 1))


# -- does a replay pay


@dataclass
class _Mean:
    """Exponential mean over about the last 16 values."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, 16)


@dataclass(frozen=True)
class Choice:
    """``cell`` None: the stock path. ``why``: no-cell, no-estimate, slower, refresh, try, faster."""

    cell: Cell | None
    why: str


class Gains:
    """Learns from measured times whether a cell beats the stock path, and chooses.

    With a latency model, what is learned is the ratio of measured to predicted time (of the padded work for a cell, of
    the batch itself for the stock path); without one, plain seconds per cell or token level. Both per history band
    (powers of two, total tokens from 1024 on); a ratio not yet learned in a band is taken from the nearest shorter one.
    Before its first replay a cell's estimate is its ``seed``.

    A cell is replayed only if its estimate is below the stock path's, with two bounded exceptions:
    *refresh*: each ``explore_every``-th batch a cell would win goes the stock way, so that estimate never goes stale;
    *try*: a cell without an estimate at this history, or one whose seed says faster though its first few replays were
    not, is replayed at most ``TRIES`` times, and no more than one batch in ``explore_every`` is spent so.
    Without an estimate of the stock path there is no replay.
    """

    TRIES = 4

    def __init__(
        self,
        buckets: Buckets,
        predict: Predict | None = None,
        *,
        strategy: str = "latency",
        explore_every: int = 64,
        stock_samples: int = 2,
    ) -> None:
        self.buckets = buckets
        self.predict = predict
        self._fewest_rows = strategy == "memory"
        self._every = explore_every
        self._stock_samples = stock_samples
        self._seed: dict[Cell, tuple[Batch, float]] = {}
        self._cell: dict[tuple[Cell, int, bool], _Mean] = {}
        self._stock: dict[tuple[int, int, bool], _Mean] = {}
        self._tries: Counter[tuple[Cell, int]] = Counter()
        self._covered = 0
        self._won = 0
        self._last_try = -explore_every

    def cell_time(self, cell: Cell, batch: Batch) -> float | None:
        """Estimated seconds of a replay; None if there is nothing to tell it from at this history."""
        base = self._model(batch.padded(cell))
        band = _band(batch.history)
        for near in range(band, -1, -1) if base is not None else (band,):
            mean = self._cell.get((cell, near, base is not None))
            if mean:
                return mean.value * (base or 1.0)
        return self._seeded(cell, batch, base)

    def _seeded(self, cell: Cell, batch: Batch, base: float | None) -> float | None:
        if cell not in self._seed:
            return None
        seeded, seconds = self._seed[cell]
        if base is None:
            return seconds if _band(batch.history) == _band(seeded.history) else None
        model = self._model(seeded.padded(cell))
        return seconds / model * base if model else None

    def _doubtful(self, cell: Cell, batch: Batch, stock: float) -> bool:
        base = self._model(batch.padded(cell))
        mean = self._cell.get((cell, _band(batch.history), base is not None))
        return mean is not None and mean.count < self.TRIES and _known(self._seeded(cell, batch, base)) < stock

    def stock_time(self, batch: Batch) -> float | None:
        """Estimated seconds of the stock path; None until measured ``stock_samples`` times near this size."""
        base = self._model(batch.requests)
        mean = self._stock.get(self._stock_key(batch, base))
        if mean is None or mean.count < self._stock_samples:
            return None
        return mean.value * (base or 1.0)

    def seed(self, cell: Cell, batch: Batch, seconds: float) -> None:
        """A replay of ``cell`` for ``batch`` was timed off the hot path; its first real replay takes precedence."""
        self._seed[cell] = (batch, seconds)

    def saw_cell(self, cell: Cell, batch: Batch, seconds: float) -> None:
        """A replay of ``cell`` took ``seconds``."""
        base = self._model(batch.padded(cell))
        key = (cell, _band(batch.history), base is not None)
        self._cell.setdefault(key, _Mean()).add(seconds / base if base else seconds)

    def saw_stock(self, batch: Batch, seconds: float) -> None:
        """The stock path took ``seconds`` for ``batch``."""
        base = self._model(batch.requests)
        self._stock.setdefault(self._stock_key(batch, base), _Mean()).add(seconds / base if base else seconds)

    @staticmethod
    def _stock_key(batch: Batch, base: float | None) -> tuple[int, int, bool]:
        # A ratio to the model holds over a wider range than plain seconds do.
        return _level(batch) // (4 if base is not None else 1), _band(batch.history), base is not None

    def forget(self, cell: Cell) -> None:
        """Drop what is known of a cell that is captured no more."""
        self._seed.pop(cell, None)
        for key in [k for k in self._cell if k[0] == cell]:
            del self._cell[key]
        for tried in [k for k in self._tries if k[0] == cell]:
            del self._tries[tried]

    def choose(self, batch: Batch) -> Choice:
        """The cell to replay, or the stock path, and why. Advances the exploration counters."""
        cells = self.buckets.covering(batch)
        if not cells:
            return Choice(None, "no-cell")
        self._covered += 1
        stock = self.stock_time(batch)
        if stock is None:
            return Choice(None, "no-estimate")
        cell = cells[0] if self._fewest_rows else min(cells, key=lambda c: _known(self.cell_time(c, batch)))
        seconds = self.cell_time(cell, batch)
        if seconds is None:
            return self._try(cell, batch, "no-estimate")
        if seconds >= stock:
            again = next((c for c in cells if self._doubtful(c, batch, stock)), None)
            return self._try(again, batch, "slower") if again else Choice(None, "slower")
        self._won += 1
        if self._won % self._every == 0:
            return Choice(None, "refresh")
        return Choice(cell, "faster")

    def _try(self, cell: Cell, batch: Batch, otherwise: str) -> Choice:
        key = (cell, _band(batch.history))
        if self._tries[key] >= self.TRIES or self._covered - self._last_try < self._every:
            return Choice(None, otherwise)
        self._tries[key] += 1
        self._last_try = self._covered
        return Choice(cell, "try")

    def _model(self, requests: Requests) -> float | None:
        seconds = self.predict(requests) if self.predict else None
        return seconds if seconds is not None and seconds > 0.0 else None


def _band(history: int) -> int:
    return (history >> 10).bit_length()


def _level(batch: Batch) -> int:
    """Steps of about 19% in tokens: batches that share one take about the same time."""
    return round(4 * math.log2(batch.tokens)) if batch.tokens else 0


# -- what traffic wants


@dataclass
class Demand:
    """The last ``window`` batches short enough for the grid, and the hits of each cell among them."""

    window: int = 512
    _seen: deque[tuple[Batch, Cell | None]] = field(init=False)
    _hits: Counter[Cell] = field(init=False, default_factory=Counter)
    total: int = field(init=False, default=0)
    hits: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._seen = deque()

    def note(self, batch: Batch, cell: Cell | None) -> None:
        """``batch`` was served by ``cell``, or (None) by the stock path."""
        self._seen.append((batch, cell))
        self.total += 1
        if cell is not None:
            self._hits[cell] += 1
            self.hits += 1
        if len(self._seen) > self.window:
            _, old = self._seen.popleft()
            if old is not None:
                self._hits[old] -= 1

    def of(self, cell: Cell) -> int:
        """Hits of a cell within the window."""
        return self._hits[cell]

    def forget(self, cell: Cell) -> None:
        """Drop the hits of a cell that is captured no more."""
        self._seen = deque((b, None if c == cell else c) for b, c in self._seen)
        del self._hits[cell]

    def swaps(
        self,
        captured: Sequence[Cell],
        candidates: Sequence[Cell],
        *,
        most: int,
        pad_max: float,
        granule: int = 8,
        protect: Iterable[Cell] = (),
        saving: Callable[[Batch, Cell], float] = prior_saving,
    ) -> list[tuple[Cell, Cell]]:
        """Up to ``most`` (dead, wanted) pairs; none before a whole window was seen.

        Dead: captured, without a hit in the window and not in ``protect``. Wanted: a candidate no larger than the
        largest captured cell that would have saved a row per batch of the window beyond what the live cells do: less is
        not worth a capture.
        """
        if len(self._seen) < self.window:
            return []
        kept = set(protect)
        dead = [c for c in captured if not self._hits[c] and c not in kept]
        if not dead:
            return []
        gone = set(dead)
        live = [c for c in captured if c not in gone]
        most = min(most, len(dead))
        roof = max(c.tokens for c in captured)
        fresh = [c for c in candidates if c not in set(captured) and c.tokens <= roof]
        wanted = rank(
            fresh,
            [b for b, _ in self._seen],
            pad_max=pad_max,
            granule=granule,
            count=most,
            have=live,
            least=float(self.window),
            saving=saving,
        )
        # The largest dead cells cost the most memory: they go first.
        return list(zip(sorted(dead, reverse=True), wanted, strict=False))
