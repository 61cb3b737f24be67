"""Every knob of the router extension: its default, its unit and its check.

Five come as flags of their own (see ``FLAGS``); the rest go into ``--laps-alloc-config '{...}'``, and so do the
fields of ``PressureConfig``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from laps_core.config import ConfigError, read_knobs
from laps_core.pools.pressure import PressureConfig

SPILLS = ("auto", "off", "short", "both")

FLAGS: dict[str, str] = {
    "threshold": "--laps-alloc-threshold",
    "interval_s": "--laps-rebalance-interval-s",
    "ratio": "--laps-rebalance-ratio",
    "tokenizer": "--laps-tokenizer",
}
"""Knobs that are flags of their own."""

COOLDOWN_SHARE = 0.9
"""Default cool-down as a share of the control period, so that a timer's jitter never skips a decision."""


@dataclass(frozen=True, kw_only=True)
class AllocConfig:
    """Validated knobs of one router. Raises ConfigError on a bad value."""

    threshold: int = 256
    """Longest short request (expected new tokens, inclusive)."""
    interval_s: float = 5.0
    """Control period: how often the pools are reconsidered (seconds)."""
    tokenizer: str | None = None
    """A tokenizer.json, or the folder that holds one; None = estimate tokens from bytes."""
    pressure: PressureConfig = field(default_factory=PressureConfig)
    """Weights and limits of the pool controller; ``--laps-rebalance-ratio`` is its ``ratio``."""

    initial_short: int | None = None
    """Short instances at the start; None = half, rounded down."""
    signal_period_s: float | None = None
    """How often signals are read from the instances (seconds); None = a fifth of the control period."""
    spill: str = "auto"
    """Which class may use the other pool when its own is overloaded: off, short, both; auto: short ones, and long ones
    where the instance runs LAPS and parks them while short ones run."""
    spill_tokens: int = 2048
    """A pool is overloaded when each of its instances has more than this in flight (new tokens)."""
    prefix_tokens: int = 1 << 20
    """Bound of the prefix index of each instance (tokens)."""
    prefix_load_factor: float = 1.5
    """The instance that holds the prefix is passed over when its load exceeds this many times its pool's mean."""
    exact_bytes: int = 16384
    """What of a request is tokenised at most; the rest is extrapolated (bytes)."""
    image_tokens: int = 512
    """What one image, video or audio part counts (tokens)."""
    max_inflight: int = 8192
    """Requests beyond this many in flight are answered 503; --max-concurrent-requests, if lower, goes first."""
    keep_alive_s: float = 75.0
    """How long an idle connection of a client stays open (seconds). Longer than the 60 s after which load balancers
    close theirs: who closes first may close on a request that is under way."""
    connect_timeout_s: float = 5.0
    """Longest wait for a connection to an instance (seconds)."""
    probe_backoff_s: float = 0.5
    """First pause between probes of an unhealthy instance (seconds); it grows by half each time."""
    probe_backoff_max_s: float = 15.0
    """Longest pause between probes of an unhealthy instance (seconds)."""
    history_s: float = 300.0
    """How far back /laps_status and the page look (seconds)."""

    def __post_init__(self) -> None:
        for name, low in (
            ("threshold", 1), ("spill_tokens", 0), ("prefix_tokens", 0), ("exact_bytes", 256),
            ("image_tokens", 0), ("max_inflight", 1),
        ):  # fmt: skip
            _whole(name, getattr(self, name), low)
        if self.initial_short is not None:
            _whole("initial_short", self.initial_short, 1)
        for name in (
            "interval_s", "keep_alive_s", "connect_timeout_s", "probe_backoff_s", "probe_backoff_max_s", "history_s",
        ):  # fmt: skip
            _positive(name, getattr(self, name))
        if self.signal_period_s is not None:
            _positive("signal_period_s", self.signal_period_s)
        _positive("prefix_load_factor", self.prefix_load_factor)
        if self.prefix_load_factor < 1:
            raise ConfigError(f"{_shown('prefix_load_factor')}: {self.prefix_load_factor!r} is not a number >= 1")
        if self.spill not in SPILLS:
            raise ConfigError(f"{_shown('spill')}: {self.spill!r} is not one of {', '.join(SPILLS)}")
        if self.tokenizer is not None and not (isinstance(self.tokenizer, str) and self.tokenizer):
            raise ConfigError(f"{_shown('tokenizer')}: {self.tokenizer!r} is not a path")

    @property
    def sample_s(self) -> float:
        """How often signals are read (seconds)."""
        return self.signal_period_s or self.interval_s / 5

    @classmethod
    def parse(cls, given: dict[str, Any], extra: str | None = None) -> AllocConfig:
        """Build from flag values (by knob name) and the text of ``--laps-alloc-config``.

        A knob named by both is refused: it has no one value.
        """
        theirs = {f.name for f in fields(PressureConfig)}
        mine = {f.name for f in fields(cls)} - {"pressure"}
        more = read_knobs("--laps-alloc-config", extra, mine | theirs, given, FLAGS)
        values = {**given, **more}
        interval = values.get("interval_s", cls.interval_s)
        _positive("interval_s", interval)
        values.setdefault("cooldown_s", COOLDOWN_SHARE * interval)
        try:
            pressure = PressureConfig(**{k: v for k, v in values.items() if k in theirs})
        except ConfigError as e:
            name, _, why = str(e).partition(":")
            raise ConfigError(f"{_shown(name)}:{why}") from None
        return cls(pressure=pressure, **{k: v for k, v in values.items() if k in mine})

    def check_instances(self, prefill: int) -> None:
        """Raise ConfigError when ``prefill`` instances cannot fill two pools."""
        n_min = self.pressure.n_min
        if 2 * n_min > prefill:
            raise ConfigError(f"{_shown('n_min')}: {n_min} for each pool needs {2 * n_min} --prefill, not {prefill}")
        if self.initial_short is not None and not n_min <= self.initial_short <= prefill - n_min:
            raise ConfigError(
                f"{_shown('initial_short')}: {self.initial_short} is not from {n_min} to {prefill - n_min}, "
                f"what {prefill} --prefill and n_min {n_min} allow"
            )

    def as_dict(self) -> dict[str, Any]:
        """Knob name -> value, JSON-ready."""
        values = asdict(self)
        return {**values, **values.pop("pressure")}


def _shown(name: str) -> str:
    return FLAGS.get(name, f"--laps-alloc-config: {name}")


def _whole(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{_shown(name)}: {value!r} is not a whole number >= {low}")


def _positive(name: str, value: Any) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if not ok:
        raise ConfigError(f"{_shown(name)}: {value!r} is not a number > 0")
