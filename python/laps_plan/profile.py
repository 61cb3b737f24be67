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
"""Shares of its operators in a layer's time, attention aside: about so in dense models of 8B to 70B."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of server. Times in seconds."""

    name: str
    source: str
    """Origin of the numbers."""
    coefficients: Coefficients
    """Cost of a step on the stock path."""
    graph_fixed_s: float | None = None
    """``fixed`` of the coefficients for a step replayed from a full graph; None = there are none."""
    eager_fixed_s: float | None = None
    """The same for a step without any prefill graph; None = the stock path has none."""
    front_s: float = 0.0
    """HTTP and tokenizer per request: one server process, first come first served."""
    front_token_s: float = 0.0
    """The same per prompt token."""
    poll_s: float = 5e-5
    """From a result to the next decision: the loop looks for new requests. Never 0, as it is nowhere."""
    step_host_s: float = 0.0
    """Host time from a decision to its step on the device."""
    launch_s: float = 0.0
    """Host time to launch a step, while the device runs it or the one before it: with the overlap loop it holds the
    host up, and in no loop a step ends before it."""
    slices_launch_s: float = 0.0
    """The same for a step in slices, pauses included: layer by layer, without prefill graphs."""
    request_host_s: float = 0.0
    """Host time per request of a batch after its step, before its first tokens leave."""
    reply_s: float = 0.0
    """From the scheduler to the client."""
    layers: int = 28
    """Layers of the model: a long batch has at most so many slices."""
    ahead: bool = False
    """True if the host launches a slice while the one before it runs, as it does where the device is not the host's own
    processor: what it decides then runs after that slice."""
    spread: Sequence[float] = ()
    """Step times vary: factors on the model's time, each as likely as the others; empty = they do not."""
    group: GroupCost | None = None
    """Cost of data-parallel attention ranks, which run every step together; None: it has none. ``coefficients`` then
    are those of one rank alone."""
    decode: DecodeCost | None = None
    """Cost of decode steps; None if unknown."""
    details: dict[str, Any] = field(default_factory=dict)
    """Assumptions or measurements behind it (JSON-ready)."""

    def model(self) -> LatencyModel:
        """A latency model that knows these coefficients, as a server that loaded a saved one does."""
        return LatencyModel(self.coefficients)

    def slices(self, seconds: float, shape: Sequence[tuple[int, int]], each: float) -> list[float]:
        """Durations (seconds) of the slices of a step that takes `seconds` for these (new, history) tokens, each of at
        most `each`, where its operators allow: attention of a layer cannot be divided."""
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
        """Time of a decode step of so many streams (from 1 on), whose contexts are so many tokens in all.

        Raises ValueError (one line) where that is not known.
        """
        if self.decode is None:
            raise ValueError(f"profile {self.name} does not say how long decode steps take")
        return self.decode.step_s(streams, context)

    @property
    def group_with_host(self) -> GroupCost | None:
        """The terms of a group's steps as its scheduler measures them, from launch to launch."""
        return self.group and replace(self.group, fixed=self.group.fixed + self.step_host_s)

    def with_ranks(self, ranks: int) -> Profile:
        """The same devices as another number of data-parallel attention ranks: fewer are of several devices each, which
        share their own part; with more there are more devices, which share the experts.

        Raises ValueError (one line) where it has no ranks, or these do not share the devices evenly.
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

    def eager(self) -> Profile:
        """The same without prefill graphs on the stock path, where the profile tells the two apart."""
        if self.eager_fixed_s is None:
            return self
        return replace(self, coefficients=replace(self.coefficients, fixed=self.eager_fixed_s))

    def stretched(self, slow: float) -> Profile:
        """The same with a device that takes ``slow`` times as long for everything, to be launched too; the rest of the
        host stays as it is."""
        terms = {k: v if k == "flat" else slow * v for k, v in asdict(self.coefficients).items()}
        graph, eager = (None if v is None else slow * v for v in (self.graph_fixed_s, self.eager_fixed_s))
        return replace(
            self, name=f"{self.name}-slow{slow:g}", coefficients=Coefficients(**terms), graph_fixed_s=graph,
            eager_fixed_s=eager, group=self.group and self.group.stretched(slow), launch_s=slow * self.launch_s,
            slices_launch_s=slow * self.slices_launch_s, decode=self.decode and self.decode.stretched(slow),
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"kind": _KIND, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def find(cls, name: str) -> Profile | None:
        """By the name of a file in profiles/, or by path; None = there is no such file, or it is no profile.

        Raises ValueError (one line) where it is a damaged one.
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
        """Return the profile as ``find`` does, for a command. Raises SystemExit that lists the names."""
        try:
            found = cls.find(name)
        except ValueError as e:
            raise SystemExit(str(e)) from None
        if found is None:
            raise SystemExit(f"no profile {name}; known: {', '.join(names())}, or a file that laps-profile wrote")
        return found


def names() -> list[str]:
    """Profiles in profiles/."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))
