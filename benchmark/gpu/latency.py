"""Step times of this device beside those of its AIConfigurator profile."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from laps_core.latency.step import StepShape
from laps_plan.profile import Profile
from laps_plan.traffic.job import Job

from benchmark.load import Prompts, client
from benchmark.results import Figure, Piece, Table
from benchmark.rig import LAPS, ON, Device, Fleet, Progress, Variant, busy_s

PROFILE = "qwen3-8b"
TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
REPEATS = 8
CHUNK = 8192


def of_this_gpu(gpus: str) -> Profile:
    """Return the profile for a GPU with this description: that of the H100, or else of the H200."""
    return Profile.load(f"h100-{PROFILE}" if "H100" in gpus else f"h200-{PROFILE}")


def steps(tokens: int) -> list[tuple[int, int]]:
    """Return (new, history) tokens of each chunk of a prompt."""
    return [(min(CHUNK, tokens - begin), begin) for begin in range(0, tokens, CHUNK)]


def latency(device: Device, gpus: str, out: Path, seed: int, say: Progress, longest: int = TOKENS[-1]) -> Piece:
    """Compare lone prompts of up to ``longest`` tokens with the profile. Raises ServerError, ConnectionError."""
    known = of_this_gpu(gpus)
    prompts = Prompts(device.vocabulary, seed, longest)
    seen: dict[int, list[float]] = {n: [] for n in TOKENS if n <= longest}
    variant = Variant(LAPS, (ON,), knobs={"slice_ms": 0})
    with Fleet(replace(device, chunk=CHUNK), [variant], prompts, out, say) as fleet:
        target = fleet.target(LAPS)
        for tokens in seen:
            for body in prompts.bodies([Job(0.0, tokens)] * (REPEATS + 1), seed * 100 + tokens):
                before = busy_s(target)
                asyncio.run(client.one_by_one(target, [body]))
                after = busy_s(target)
                if before is not None and after is not None:
                    seen[tokens].append((after - before) / device.slow)
            seen[tokens] = seen[tokens][1:]
    return piece_of(seen, known, device, seed)


def piece_of(seen: dict[int, list[float]], known: Profile, device: Device, seed: int) -> Piece:
    """Return the piece. ``seen``: tokens of a prompt -> device time of each (seconds)."""
    rows: list[Sequence[str]] = []
    ratios = []
    for tokens, took in seen.items():
        measured = statistics.median(took)
        predicted = sum(known.coefficients.seconds(StepShape.of([step])) for step in steps(tokens))
        ratios.append(measured / predicted)
        rows.append((str(tokens), f"{1e3 * measured:.2f}", f"{1e3 * predicted:.2f}", f"{ratios[-1]:.2f}"))
    figures = [
        Figure("measured over predicted, median of the lengths", statistics.median(ratios)),
        Figure("the furthest from 1", max(ratios, key=lambda r: max(r, 1.0 / r))),
    ]
    text = f"Device time of lone prompts, {device.what}, beside the profile {known.name} ({known.source})."
    table = Table("Device time (ms)", ("tokens", "measured", "profile", "ratio"), rows, f"{REPEATS} of each; medians.")
    data = {str(n): took for n, took in seen.items()}
    return Piece("latency", "Step times beside AIConfigurator's", text, seed, [table], figures, data=data)
