"""Every knob of the LAPS prefill scheduler: its default, its unit and the check it must pass.

Four come as flags of their own (see ``FLAGS``); all can be given in ``--laps-config '{...}'``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any

from laps_core import deadline

AUTO = "auto"
"""``length_threshold``: take the boundary from the fitted latency model."""


class ConfigError(ValueError):
    """A knob has a value it cannot have. The message is one line and names the knob."""


Check = Callable[[Any], "str | None"]
"""Says what is wrong with a value ("is not ..."), or None."""


def _whole(low: int, unit: str) -> Check:
    def check(v: Any) -> str | None:
        ok = isinstance(v, int) and not isinstance(v, bool) and v >= low
        return None if ok else f"is not a whole number of {unit} >= {low}"

    return check


def _real(low: float, high: float, unit: str) -> Check:
    def check(v: Any) -> str | None:
        # Compared, never converted: a whole number may be too large for a float.
        ok = isinstance(v, (int, float)) and not isinstance(v, bool) and low <= v <= min(high, sys.float_info.max)
        bound = f">= {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        return None if ok else f"is not a number of {unit} {bound}" if unit else f"is not {bound}"

    return check


def _one_of(*names: str) -> Check:
    return lambda v: None if v in names else f"is not one of {', '.join(names)}"


def _switch(v: Any) -> str | None:
    return None if isinstance(v, bool) else "is not true or false"


def _text(v: Any) -> str | None:
    return None if isinstance(v, str) and v and "\0" not in v else "is not a path"


def _or_none(check: Check) -> Check:
    return lambda v: None if v is None else check(v)


def _sizes(unit: str) -> Check:
    whole = _whole(1, unit)

    def check(v: Any) -> str | None:
        ok = isinstance(v, (list, tuple)) and v and all(whole(x) is None for x in v)
        return None if ok else f"is not a list of whole numbers of {unit} >= 1"

    return check


def _threshold(v: Any) -> str | None:
    return None if v == AUTO or _whole(1, "tokens")(v) is None else "is not a whole number of tokens >= 1, nor auto"


def _profile(v: Any) -> str | None:
    return None if isinstance(v, bool) or _text(v) is None else "is not true or false, nor a path"


def _deadline(v: Any) -> str | None:
    return None if deadline.valid(v) else f"is not {deadline.RANGE}"


def knob(default: Any, check: Check) -> Any:
    """A dataclass field with its check."""
    return field(default=default, metadata={"check": check})


def read_knobs(
    flag: str,
    text: str | None,
    known: Set[str],
    given: Mapping[str, Any],
    flags: Mapping[str, str],
    retired: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON object in the text of ``flag``: names in ``known`` only, none that a flag has ``given`` already.

    ``flags`` names those flags; ``retired`` says of names that are no knobs what there is in their place. Raises
    ConfigError.
    """

    def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ConfigError(f"{flag}: {twice} is given twice")
        return dict(pairs)

    more: Any = {}
    if text:
        try:
            more = json.loads(text, object_pairs_hook=each_key_once)
        except ConfigError:
            raise
        except ValueError as e:
            raise ConfigError(f"{flag}: not JSON: {e}") from None
    if not isinstance(more, dict):
        raise ConfigError(f"{flag}: not a JSON object")
    for key in more:
        if retired and key in retired:
            raise ConfigError(f"{flag}: {key} {retired[key]}")
        if key not in known:
            raise ConfigError(f"{flag}: unknown key {key!r}; known: {', '.join(sorted(known))}")
        if key in given:
            raise ConfigError(f"{flag}: {key} is given by {flags[key]} too")
    return more


_MS = _real(0.0, math.inf, "milliseconds")


@dataclass(frozen=True, kw_only=True)
class LapsConfig:
    """Validated knobs of one prefill server. Raises ConfigError on a bad value."""

    # -- the dual queue
    length_threshold: int | str = knob(256, _threshold)
    """Longest short request (tokens, inclusive), or "auto"."""
    length_basis: str = knob("uncached", _one_of("uncached", "prompt"))
    """Which tokens count: those not found in the prefix cache, or the whole prompt."""
    order: str = knob("least-work", _one_of("least-work", "fcfs", "edf", "lars", "s-edf"))
    """Order of long prompts, see scheduling/order.py; all but least-work order short requests too."""
    guard: float = knob(0.25, _real(0.0, 1.0, ""))
    """Under least-work: share of long time for the prompt that has waited longest (0..1)."""
    preempt_overhead: float = knob(0.15, _real(0.01, 1.0, ""))
    """Share of the device that preempting long work may cost (0.01..1); sets the gap between preemptions."""
    slice_ms: float = knob(4.0, _real(0.0, 1000.0, "milliseconds"))
    """A long batch makes way about this often (ms); 0 = never before its end."""

    # -- the waiting window (AWD)
    window: str = knob("awd", _one_of("awd", "fixed"))
    """awd adapts W and D [L s3.1, Alg. 1]; fixed always waits the whole window or for a full batch."""
    wait_window_ms: float = knob(5.0, _MS)
    """W_max: longest wait for a short batch to fill (ms); 0 = dual queue only."""
    wait_max_batch: int = knob(8, _whole(1, "requests"))
    """Cap on the batch depth D (requests)."""
    ttft_slo_ms: float | None = knob(None, _or_none(_deadline))
    """Default deadline for the first token (ms after arrival); None = no deadlines."""

    # -- the latency model
    profile: bool | str = knob(False, _profile)
    """True: measure a short latency profile at start (seconds of start-up time). A path: start from the model saved
    there, measure only where there is none, and save there when idle (JSON)."""

    # -- prefill CUDA graphs for short batches (see ladder.py)
    graphs: bool = knob(False, _switch)
    """Replay short batches from full CUDA graphs where that was timed faster."""
    graph_lengths: Sequence[int] = knob((8, 16, 32, 64, 128, 256), _sizes("tokens"))
    """L: the longest admits requests (tokens), the products L x B give the row counts [L s4.2]."""
    graph_batches: Sequence[int] = knob((1, 2, 4, 8, 16, 32, 64), _sizes("requests"))
    """B: the largest admits batches (requests) and is every graph's number of request slots [L s4.2]."""
    graph_strategy: str = knob("latency", _one_of("latency", "memory", "always"))
    """Row counts captured. memory: the products L x B alone; latency: steps between them too, to pad less [L s3.1];
    always: the same, and each batch that a graph holds is replayed, faster or not, for measurements."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            wrong = f.metadata["check"](value)
            if wrong:
                name = FLAGS.get(f.name, f"--laps-config: {f.name}")
                raise ConfigError(f"{name}: {json.dumps(value, default=str)} {wrong}")

    @property
    def profile_path(self) -> str | None:
        """The file of the latency model, if there is to be one."""
        return self.profile if isinstance(self.profile, str) else None

    @classmethod
    def parse(cls, given: Mapping[str, Any], extra: str | None = None) -> LapsConfig:
        """Build from flag values (by field name) and the text of ``--laps-config``.

        A knob named by both is refused: it has no one value.
        """
        more = read_knobs("--laps-config", extra, {f.name for f in fields(cls)}, given, FLAGS, RETIRED)
        knobs: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in {**given, **more}.items()}
        return cls(**knobs)

    def as_dict(self) -> dict[str, Any]:
        """Field name -> value, JSON-ready."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


FLAGS: dict[str, str] = {
    "length_threshold": "--laps-length-threshold",
    "length_basis": "--laps-length-basis",
    "wait_window_ms": "--laps-wait-window-ms",
    "wait_max_batch": "--laps-wait-max-batch",
    "ttft_slo_ms": "--laps-ttft-slo-ms",
    "graphs": "--enable-batch-prefill-cuda-graph",
    "graph_lengths": "--batch-prefill-seq-lengths",
    "graph_batches": "--batch-prefill-batch-sizes",
}
"""Knobs that are flags of their own."""

RETIRED: dict[str, str] = {
    **dict.fromkeys(("profile_path", "profile_save_path"), "is profile, a path"),
    "wait_head_max_ms": "is four times --laps-wait-window-ms",
    "graph_max_length": "is --batch-prefill-max-seq-len",
    "graph_always": 'is graph_strategy "always"',
    **dict.fromkeys(("graph_budget", "graph_budget_s", "graph_pad_max"), "is graph_strategy, or fewer L and B"),
    **dict.fromkeys(("graph_explore_every", "graph_swaps", "graph_window"), "is gone: graphs are chosen at start"),
    **dict.fromkeys(
        ("wait_min_ms", "slack_sigma_ms", "slack_margin_ms", "token_max", "threshold_min", "threshold_max",
         "threshold_period_s", "status_period_s", "graph_max_tokens", "graph_budget_mib"),
        "has one value for all",
    ),
}  # fmt: skip
"""Names that are no knobs, each with what to set in its place or why there is nothing to set."""
