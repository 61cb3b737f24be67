"""Knobs of the LAPS prefill scheduler, each with default, unit and valid values, and the code that reads knobs.

Some knobs have a flag of their own; all can be set in ``--laps-config '{...}'``. The defaults are also in the tables of
docs/LAPS.md and in test_config.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from laps_core import deadline
from laps_core.length import CLASSES, ClassName

AUTO = "auto"
"""Value of ``length_threshold`` that takes the boundary from the fitted latency model."""


class ConfigError(ValueError):
    """Invalid value of a knob. The message is one line and names the knob."""


def _wanted(kind: Any) -> str:
    """Return the end of the message "VALUE is not ...": the valid values of this type, in words."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return str(parts[1].description)
    if get_origin(kind) is Literal:
        return parts[0] if len(parts) == 1 else f"one of {', '.join(parts)}"
    wanted = [_wanted(part) for part in parts if part is not type(None)] or ["true or false"]
    return wanted[0] if len(wanted) == 1 else f"valid: must be {', or '.join(wanted)}"


def format_value(value: Any) -> str:
    """Return the value of a knob as text for a command line."""
    if isinstance(value, tuple):
        return ",".join(map(format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Validated settings. The type of a field defines its valid values. Raises ConfigError on a bad value."""

    JSON_FLAG: ClassVar[str]
    """Flag whose value is a JSON object of knobs."""
    FLAGS: ClassVar[Mapping[str, str]]
    """Knob -> flag, for knobs that have a flag of their own."""

    _kinds: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls._kinds = {name: kind for name, kind in hints.items() if get_origin(kind) is not ClassVar}

    def __post_init__(self) -> None:
        for name in self._kinds:
            object.__setattr__(self, name, self._read(name, getattr(self, name)))

    @classmethod
    def _read(cls, name: str, value: Any, *, strict: bool = True) -> Any:
        """Validate one value. `strict` False: the value is one string, or several, from a command line."""
        kind = cls._kinds[name]
        try:
            return msgspec.convert(value, kind, strict=strict)
        except msgspec.ValidationError:
            shown = json.dumps(value if strict or isinstance(value, str) else " ".join(value), default=str)
            shown = shown if strict else shown.strip('"') or shown
            raise ConfigError(f"{cls.display_name(name)}: {shown} is not {_wanted(kind)}") from None

    @classmethod
    def display_name(cls, name: str) -> str:
        """Return the name of this knob as an operator writes it."""
        return cls.FLAGS.get(name, f"{cls.JSON_FLAG}: {name}")

    @classmethod
    def parse(cls, given: Mapping[str, Any], extra: str | None = None) -> Self:
        """Read knobs from their flags (`given`: knob -> string, strings or True) and from the text of JSON_FLAG.

        Raises ConfigError, also if a flag and the JSON object set the same knob.
        """
        read = {name: cls._read(name, value, strict=False) for name, value in given.items()}
        return cls(**read, **cls._json(extra, given))

    @classmethod
    def _json(cls, text: str | None, given: Iterable[str]) -> dict[str, Any]:
        """Return the knobs in the text of JSON_FLAG. `given`: knobs set by flags, which the text must not set again."""
        try:
            # An object becomes a tuple of pairs, so that repeated keys are found; an array becomes a list.
            pairs = json.loads(text or "{}", object_pairs_hook=lambda pairs: tuple(pairs))
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{cls.JSON_FLAG}: not JSON: {e}") from None
        if not isinstance(pairs, tuple):
            raise ConfigError(f"{cls.JSON_FLAG}: not a JSON object")
        found: dict[str, Any] = {}
        for key, value in pairs:
            for hit, wrong in (
                (key in found, f"{key} is given twice"),
                (key not in cls._kinds, f"unknown key {key!r}; known: {', '.join(sorted(cls._kinds))}"),
                (key in given, f"{key} is also set by {cls.FLAGS.get(key)}"),
            ):
                if hit:
                    raise ConfigError(f"{cls.JSON_FLAG}: {wrong}")
            found[key] = value
        return found

    @classmethod
    def as_arguments(cls, knobs: Mapping[str, Any]) -> list[str]:
        """Return these knobs as command-line arguments: flags with their values, the rest as one JSON_FLAG."""
        own = {name: value for name, value in knobs.items() if name not in cls.FLAGS}
        said = [f"{cls.FLAGS[name]} {format_value(value)}" for name, value in knobs.items() if name in cls.FLAGS]
        return [*said, *([f"{cls.JSON_FLAG} '{json.dumps(own)}'"] if own else [])]

    def as_dict(self) -> dict[str, Any]:
        """Return field name -> value (JSON-ready)."""
        return asdict(self)


def _number(low: float, high: float = sys.float_info.max, *, of: str = "") -> Meta:
    bound = f">= {low:g}" if high == sys.float_info.max else f"from {low:g} to {high:g}"
    return Meta(ge=low, le=high, description=f"a number of {of} {bound}" if of else bound)


def _whole(of: str) -> Meta:
    return Meta(ge=1, description=f"a whole number of {of} >= 1")


def _whole_list(of: str) -> Meta:
    return Meta(min_length=1, description=f"a list of whole numbers of {of} >= 1")


Path = Annotated[str, Meta(min_length=1, pattern=r"\A[^\0]*\Z", description="a path")]
Milliseconds = Annotated[float, _number(0.0, of="milliseconds")]
Deadline = Annotated[float, Meta(ge=deadline.SHORTEST_MS, le=deadline.LONGEST_MS, description=deadline.RANGE)]
Deadlines = Annotated[tuple[Deadline, ...], Meta(min_length=2, max_length=2, description="two of them, short,long")]
Tokens = Annotated[int, _whole("tokens")]
Requests = Annotated[int, _whole("requests")]


@dataclass(frozen=True, kw_only=True)
class LapsConfig(Knobs):
    """Validated knobs of one prefill server. Raises ConfigError on a bad value."""

    preset: Literal["paper"] | None = None
    """"paper": LAPS as published, a baseline to compare with. It changes the defaults of other knobs (see PRESETS)."""

    # -- the dual queue
    length_threshold: Tokens | Literal["auto"] = 256
    """Longest short request (tokens, inclusive), or "auto"."""
    length_basis: Literal["uncached", "prompt"] = "uncached"
    """Tokens that count for the class: those not found in the prefix cache, or the whole prompt."""
    order: Literal["least-work", "fcfs", "lars", "s-edf"] = "least-work"
    """Order of long prompts, see policy/order.py."""
    guard: Annotated[float, _number(0.0, 1.0)] = 0.15
    """Share of long time for the long prompt that has waited longest (0..1)."""
    preempt_overhead: Annotated[float, _number(0.01, 1.0)] = 0.25
    """Share of the device that preempting long work may cost (0.01..1); sets the gap between preemptions."""
    slice_ms: Annotated[float, _number(0.0, 1000.0, of="milliseconds")] = 4.0
    """Target time of a slice: a long batch can be preempted about this often (ms); 0 = never before its end."""

    # -- servers that prefill and decode
    tbt_ms: Milliseconds | None = None
    """Target for the time between tokens while prompts wait (ms); None = four times the time of a decode step, at
    least 50; 0 = prompts always go first."""

    # -- the waiting window (AWD)
    window: Literal["awd", "fixed"] = "awd"
    """awd holds a batch if that pays (LAPS, s3.1, Alg. 1); fixed always, until the window ends or the batch is full."""
    wait_window_ms: Milliseconds = 10.0
    """W_max: longest hold of a short batch (ms); 0 = never hold."""
    wait_max_batch: Requests = 8
    """Cap on the batch depth D (requests)."""
    ttft_slo_ms: Deadline | Deadlines | None = None
    """Default deadline for the first token (ms after arrival): one for all requests, or one for short and one for long
    requests; None = no deadlines."""

    # -- the latency model
    profile: bool | Path = False
    """True: measure a short latency profile at start (seconds of start-up time). A path: start from the model saved
    there, measure only if the file does not exist, and save the model there when idle (JSON)."""

    # -- receipts
    receipts: bool = True
    """Keep the receipts of the last requests, and the device's timeline: ``/laps_receipts``, ``/laps_trace``."""

    # -- prefill CUDA graphs for short batches (see ladder.py)
    graphs: bool = False
    """Replay short batches from full CUDA graphs if these were faster when timed."""
    graph_lengths: Annotated[tuple[Tokens, ...], _whole_list("tokens")] = (8, 16, 32, 64, 128, 256)
    """L: the largest is the most new tokens of a request; the products L x B give the row counts (LAPS, s4.2)."""
    graph_batches: Annotated[tuple[Requests, ...], _whole_list("requests")] = (1, 2, 4, 8, 16, 32, 64)
    """B: the largest is the most requests of a batch, and every graph's number of request slots (LAPS, s4.2)."""
    graph_strategy: Literal["latency", "memory", "always"] = "latency"
    """Row counts captured. memory: the products L x B alone. latency: steps between them too, to pad less (LAPS, s3.1).
    always: as latency, and every batch that fits a graph is replayed, faster or not, for measurements."""

    JSON_FLAG = "--laps-config"
    FLAGS: ClassVar[Mapping[str, str]] = {
        "length_threshold": "--laps-length-threshold",
        "length_basis": "--laps-length-basis",
        "wait_window_ms": "--laps-wait-window-ms",
        "wait_max_batch": "--laps-wait-max-batch",
        "ttft_slo_ms": "--laps-ttft-slo-ms",
        "tbt_ms": "--laps-tbt-ms",
        "graphs": "--enable-batch-prefill-cuda-graph",
        "graph_lengths": "--batch-prefill-seq-lengths",
        "graph_batches": "--batch-prefill-batch-sizes",
    }
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"length_basis": "prompt", "order": "fcfs", "slice_ms": 0.0, "guard": 0.0, "wait_window_ms": 5.0},
    }
    """Preset -> values for knobs that are left at their defaults."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = {f.name: f.default for f in fields(self)}
        for name, value in self.PRESETS.get(self.preset or "", {}).items():
            if getattr(self, name) == known[name]:
                object.__setattr__(self, name, value)

    def deadline_s(self, kind: ClassName) -> float | None:
        """Return the default deadline of a request that has this class on arrival (seconds); None = no deadline."""
        ms = self.ttft_slo_ms
        if isinstance(ms, tuple):
            ms = ms[CLASSES.index(kind)]
        return None if ms is None else ms / 1e3

    @property
    def profile_path(self) -> str | None:
        """Return the path of the latency model's file; None = no file."""
        return self.profile if isinstance(self.profile, str) else None
