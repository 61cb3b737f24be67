"""From a grid of step times to a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from laps_core.latency.fitting import fit
from laps_core.latency.step import Coefficients, StepSample

from laps_plan.decode import DecodeCost
from laps_plan.kernels import decode
from laps_plan.kernels.decode import DecodeSample
from laps_plan.profile import Profile

MEDIAN, P90 = 0.10, 0.20
"""Relative errors over its grid that a profile should stay within."""


@dataclass(frozen=True)
class Host:
    """Host time of a request and of a step, beside the kernels: assumptions. Times in seconds.

    Their sum is what one of our own measurements left: TTFT of lone prompts of 64 to 16,384 tokens on an idle prefill
    server on an H200 (Qwen2.5-7B's shape; benchmark/report, ``gpu-mixed``), less the kernels' time, was 5.1 to 8.4 ms.
    How it divides is not measured.
    """

    front_s: float = 0.7e-3
    """HTTP and tokenizer, one request after the other."""
    front_token_s: float = 0.35e-6
    """The same per prompt token."""
    step_host_s: float = 0.8e-3
    """From a decision to its step on the device, which the overlap loop does not hide."""
    reply_s: float = 4e-3
    """Between processes, result, detokenizer, HTTP: it holds nobody else up."""
    eager_layer_s: float = 220e-6
    """To launch one layer kernel by kernel."""
    breakable_layer_s: float = 90e-6
    """The same where graphs are broken at attention, SGLang's default for prefill."""
    full_layer_s: float = 4e-6
    """Device gaps per layer within one whole graph."""
    slice_layer_s: float = 590e-6
    """To launch one layer of a step in slices, pauses included: a LAPS server on an H200 measured 16.5 ms for 28."""


def errors(known: Coefficients, rows: Sequence[StepSample]) -> dict[str, float]:
    """Relative errors: median, p90, worst; and how many rows."""
    return summary([abs(known.seconds(s.shape) / s.seconds - 1.0) for s in rows])


def decode_errors(known: DecodeCost, rows: Sequence[DecodeSample]) -> dict[str, float]:
    """The same of whole decode steps."""
    return summary([abs(known.step_s(s.streams, s.context) / (s.rows_s + s.attention_s) - 1.0) for s in rows])


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Median, p90, worst of relative errors; and how many."""
    off = np.array(errors)
    return {
        "median": float(np.median(off)), "p90": float(np.quantile(off, 0.9)), "worst": float(off.max()),
        "rows": len(off),
    }  # fmt: skip


def profile(
    name: str, source: str, layers: int, rows: Sequence[StepSample], details: dict[str, Any], host: Host | None = None,
    steps: Sequence[DecodeSample] = (),
) -> Profile:  # fmt: skip
    """The profile of one model on one device. ``details``: what it was asked from (JSON-ready). ``steps``: of decoding;
    empty = not known."""
    host = host or Host()
    known = fit(rows)

    def fixed(layer_s: float) -> float:
        return max(known.fixed, layer_s * layers - known.linear * known.flat)

    made = Profile(
        name=name,
        source=source,
        coefficients=replace(known, fixed=fixed(host.breakable_layer_s)),
        graph_fixed_s=fixed(host.full_layer_s),
        eager_fixed_s=fixed(host.eager_layer_s),
        front_s=host.front_s,
        front_token_s=host.front_token_s,
        step_host_s=host.step_host_s,
        reply_s=host.reply_s,
        launch_s=host.breakable_layer_s * layers,
        slices_launch_s=host.slice_layer_s * layers,
        layers=layers,
        ahead=True,
        details={
            **details,
            "assumed": asdict(host),
            "fit": errors(known, rows),
            "kernels": asdict(known),
            "grid": [[*s.shape, float(f"{s.seconds:.5g}")] for s in rows],
        },
    )
    return with_decode(made, steps) if steps else made


def with_decode(profile: Profile, steps: Sequence[DecodeSample]) -> Profile:
    """The same profile with what decode steps cost."""
    known = decode.cost(steps)
    rows = [[s.streams, s.context, float(f"{s.rows_s:.5g}"), float(f"{s.attention_s:.5g}")] for s in steps]
    more = {"decode_fit": decode_errors(known, steps), "decode_grid": rows}
    return replace(profile, decode=known, details={**profile.details, **more})
