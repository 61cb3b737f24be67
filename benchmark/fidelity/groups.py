"""Loads of a group of data-parallel attention ranks, the stock setting that is best for each, and emulated servers with
one scheduler process for each rank."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from laps_core.config import LapsConfig
from laps_plan.traffic import turns
from laps_plan.traffic.job import Job

from benchmark.rig import architectures, devices
from benchmark.rig.devices import Device
from benchmark.rig.variants import LAPS, ON, SPF, Variant
from benchmark.sim.groups import BEST, LONGEST, THINK_S, TOKEN_S, mix

TURNS = 11
"""Turns of a session, around a random one of them."""

MORE = 10
"""Sessions drawn, over those that are needed on average."""


@dataclass(frozen=True)
class Load:
    """A load by name. Rates are those of the unscaled device (requests/s): 70% of what fcfs does on four ranks in
    saturation."""

    name: str
    what: str
    rate: float
    slow: float
    """Slowdown of the device: its steps are long beside what four schedulers and the tiny model take on two cores."""
    chunk: int
    """New tokens of a stock rank's batch: the best mean TTFT of 512 to 8,192, simulated at that rate."""
    longest: int
    """Longest prompt (tokens)."""
    sessions: bool
    """True if turns follow answers and go to the rank that has their history."""
    make: Callable[[float, float, str], list[Job]]
    """Jobs at a rate, for a span (seconds), from a seed; unscaled."""
    bars: tuple[float, float, float]
    """At most so much of the best stock policy's short P90, mean TTFT and mean slowdown."""

    @property
    def piece(self) -> str:
        """Name of its piece of the report."""
        return "groups" if self.name == "mix" else f"groups-{self.name}"

    def jobs(self, rate: float, slow: float, span_s: float, seed: str) -> list[Job]:
        """Return the jobs of a round on a device that is ``slow`` times as slow, and so are the clients; ``span_s``:
        scaled."""
        made = self.make(rate, span_s / slow, seed)
        return [replace(job, at_s=slow * job.at_s, pause_s=slow * job.pause_s) for job in made]


def mixed(rate: float, span_s: float, seed: str) -> list[Job]:
    """Return the simulator's mix."""
    return mix(rate, span_s, random.Random(f"mix/{seed}"))


def agents(rate: float, span_s: float, seed: str) -> list[Job]:
    """Return the turns of coding agents in a span without beginning or end: of sessions that are under way, whose
    histories are in the cache. As many turns as the rate says: a round has so few sessions that chance would double or
    halve its load."""
    rng = random.Random(f"agents/{seed}")
    begun: list[tuple[float, Sequence[turns.Turn]]] = []
    drawn = turns.stretches(turns.agents(LONGEST, THINK_S, TOKEN_S), TURNS, rate, MORE * span_s, rng)
    for _, session in drawn:
        if sum(len(s) for _, s in begun) < rate * span_s:
            begun.append((rng.uniform(0.0, span_s), session))
    return turns.jobs(begun, span_s)


LOADS = {
    load.name: load
    for load in (
        Load(
            "mix", "95% LMSYS lengths and 5% of 1,024 to 8,192 tokens",
            rate=110.0, slow=10.0, chunk=1024, longest=8192, sessions=False, make=mixed,
            bars=(0.90, 0.83, 0.86),
        ),
        Load(
            "agents", "Turns of coding agents, each after the answer before it, on histories of up to 128k tokens",
            rate=1.33, slow=3.0, chunk=BEST["agents"], longest=LONGEST, sessions=True, make=agents,
            bars=(0.40, 0.58, 0.36),
        ),
    )
}  # fmt: skip
PROFILE, MODEL = "h200-deepseek-v3-dp8", "deepseek3"
CHUNK = 8192
"""Most new tokens of a rank's batch."""
CONTEXT = 131_072 + 1024
POOL = 1_500_000
"""Tokens that a rank keeps: of sessions that are under way, and some that are over."""
LAYERS = 2
"""Layers of the tiny model where a rank keeps so many tokens: one dense, one with experts."""
_YARN = {**architectures.DEEPSEEK["rope_parameters"], "original_max_position_embeddings": -(-CONTEXT // 4)}
LONG = (
    "--context-length", str(CONTEXT), "--max-total-tokens", str(POOL), "--json-model-override-args",
    json.dumps({"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT, "rope_parameters": _YARN}),
)  # fmt: skip
"""Arguments of servers whose prompts are longer than what the tiny model was made for."""


def device_of(load: Load, slow: float, ranks: int) -> Device:
    """Return the emulated group for a load."""
    made = devices.emulated(f"{PROFILE},slow={slow:g}")
    if load.sessions:
        made = made.with_prefixes()
    # SGLang needs a core for each rank, out of those that it may use.
    usable = sorted(os.sched_getaffinity(0))
    env = {**made.env, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(usable[i % len(usable)]) for i in range(ranks))}
    return replace(
        made,
        args=(*made.args, *(LONG if load.sessions else ())),
        env=env,
        checkpoint=lambda: architectures.make(devices.MODELS, MODEL),
        start_s=600.0,
        sleeps=False,
    )


def knobs(slow: float) -> dict[str, float]:
    """Return LAPS's knobs for a device that is ``slow`` times as slow: its slices take as much longer."""
    return {"slice_ms": slow * LapsConfig().slice_ms}


def servers_of(load: Load, ranks: int, slow: float) -> list[Variant]:
    """Return stock's best policy for this load, and LAPS. SGLang divides the chunk by the number of ranks."""
    group = (
        *("--tp-size", str(ranks), "--dp-size", str(ranks), "--enable-dp-attention"),
        *("--load-balance-method", "total_tokens", "--disable-overlap-schedule"),
        # SGLang keeps memory for a chunk that this machine does not have, though nothing as large runs.
        *("--mem-fraction-static", "0.5"),
    )
    chunks = {SPF: load.chunk, LAPS: CHUNK}
    own = {SPF: ("--schedule-policy", SPF), LAPS: (ON, "--laps-config", json.dumps(knobs(slow)))}
    return [Variant(n, (*group, *own[n], "--chunked-prefill-size", str(ranks * chunks[n]))) for n in chunks]
