"""Profiles of simulated hardware: a latency model's coefficients and the host's time around a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from laps_core.group.cost import GroupCost
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients, StepShape
from laps_core.slicing import Operator, pairs, slices

from laps_plan.decode import DecodeCost

FOLDER = Path(__file__).parent / "profiles"
_KIND = "laps-sim-profile"
PROJECTIONS, OUTPUT, MLP = 0.15, 0.1, 0.75
"""Approximate shares of operators in a layer's time without attention, in dense models of 8B to 70B."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of server. Times in seconds."""

    name: str
    source: str
    """Origin of the numbers."""
    coefficients: Coefficients
    """Cost of a step on the stock path."""
    front_s: float = 0.0
    """Time of HTTP and tokenizer per request: one server process, first come first served."""
    front_token_s: float = 0.0
    """Time of HTTP and tokenizer per prompt token."""
    poll_s: float = 5e-5
    """Time from a result to the next decision, in which the loop looks for new requests. Not 0 on any real server."""
    step_host_s: float = 0.0
    """Host time from a decision to its step on the device."""
    launch_s: float = 0.0
    """Host time to launch a step, while the device runs this step or the one before. With the overlap loop the host is
    busy for this time, and the step does not end before its launch does."""
    slices_launch_s: float = 0.0
    """Host time to launch a step in slices, pauses included: layer by layer, without prefill graphs."""
    reply_s: float = 0.0
    """Time from the scheduler to the client."""
    layers: int = 28
    """Layers of the model; a long batch is sliced between and within layers."""
    ahead: bool = False
    """True if the host launches a slice while the slice before it runs, as on any device but the host's own processor:
    a batch that the host then decides on runs after the launched slice."""
    spread: Sequence[float] = ()
    """Equally likely factors on the model's step time; empty if step times do not vary."""
    group: GroupCost | None = None
    """Cost of data-parallel attention ranks, which run every step together; None without such ranks. With ranks,
    ``coefficients`` are those of one rank alone."""
    decode: DecodeCost | None = None
    """Cost of decode steps; None if unknown."""
    details: dict[str, Any] = field(default_factory=dict)
    """Assumptions or measurements behind the profile (JSON-ready)."""

    def model(self) -> LatencyModel:
        """Return a latency model with these coefficients, as on a server that loaded a saved model."""
        return LatencyModel(self.coefficients)

    def slices(self, seconds: float, shape: Sequence[tuple[int, int]], each: float) -> list[float]:
        """Return the durations (seconds) of the slices of a step that takes `seconds` for these (new, history) tokens:
        at most `each`, if the operators allow. Attention of a layer cannot be divided."""
        tokens, attended = sum(new for new, _ in shape), pairs(shape)
        attention_s = min(seconds, self.coefficients.alpha * StepShape.of(shape).attention)
        token_s = (seconds - attention_s) / self.layers / tokens
        operators = (
            Operator(PROJECTIONS * token_s),
            Operator(0.0, attention_s / self.layers / attended),
            Operator(OUTPUT * token_s),
            Operator(MLP * token_s, divisible=True),
        )
        return list(slices(operators, self.layers, tokens, attended, each))

    def decode_s(self, streams: int, context: float) -> float:
        """Return the time of a decode step of ``streams`` streams (at least 1) with ``context`` tokens of context in
        all.

        Raises ValueError (one line) if the profile has no cost of decode steps.
        """
        if self.decode is None:
            raise ValueError(f"profile {self.name} does not say how long decode steps take")
        return self.decode.step_s(streams, context)

    @property
    def group_with_host(self) -> GroupCost | None:
        """Return the cost of a group's steps as its scheduler measures them, from launch to launch."""
        return self.group and replace(self.group, fixed=self.group.fixed + self.step_host_s)

    def with_ranks(self, ranks: int) -> Profile:
        """Return the same devices as another number of data-parallel attention ranks. Fewer ranks have several devices
        each, which share the rank's own part. More ranks are on more devices, which share the experts.

        Raises ValueError (one line) if the profile has no ranks, or if these ranks do not share the devices evenly.
        """
        group = self.group
        if group is None:
            raise ValueError(f"profile {self.name} has no data-parallel attention ranks")
        if max(ranks, group.ranks) % min(ranks, group.ranks):
            raise ValueError(f"{ranks} ranks do not share the devices of {self.name} evenly: it has {group.ranks}")
        own, experts = min(1.0, ranks / group.ranks), min(1.0, group.ranks / ranks)
        absorbed = None if group.absorbed is None else own * group.absorbed
        more = replace(
            group, ranks=ranks, token=own * group.token, alpha=own * group.alpha, unpack=own * group.unpack,
            absorbed=absorbed, expert=experts * group.expert,
        )  # fmt: skip
        return replace(self, group=more)

    def stretched(self, slow: float) -> Profile:
        """Return the profile with every step and launch ``slow`` times as long; other host times stay as they are."""
        terms = {k: v if k == "flat" else slow * v for k, v in asdict(self.coefficients).items()}
        return replace(
            self, name=f"{self.name}-slow{slow:g}", coefficients=Coefficients(**terms),
            group=self.group and self.group.stretched(slow), launch_s=slow * self.launch_s,
            slices_launch_s=slow * self.slices_launch_s, decode=self.decode and self.decode.stretched(slow),
        )  # fmt: skip

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"kind": _KIND, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def find(cls, name: str) -> Profile | None:
        """Return the profile of this name in profiles/, or at this path; None if there is no profile in such a file.

        Raises ValueError (one line) if the profile is damaged.
        """
        path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
        try:
            raw = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            return None
        if not isinstance(raw, dict) or raw.get("kind") != _KIND:
            return None
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as e:
            raise ValueError(f"profile {name}: damaged ({e})") from None

    @classmethod
    def load(cls, name: str) -> Profile:
        """Return the profile that ``find`` finds, for a command. Raises SystemExit with one line if there is none."""
        try:
            found = cls.find(name)
        except ValueError as e:
            raise SystemExit(str(e)) from None
        if found is None:
            if Path(name).is_file():
                raise SystemExit(f"{name} is not a profile that laps-profile wrote")
            raise SystemExit(f"no profile {name}; known: {', '.join(names())}, or a file that laps-profile wrote")
        return found


def names() -> list[str]:
    """Return the names of the profiles in profiles/."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))
