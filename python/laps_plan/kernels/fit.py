"""Profile fitted to a grid of step times."""

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
"""Relative errors over the grid within which a profile should stay."""


@dataclass(frozen=True)
class Host:
    """Assumed host time of a request and of a step, in addition to the kernels. Times in seconds.

    The sum of the terms follows a measurement: TTFT of lone prompts of 64 to 16,384 tokens on an idle prefill server on
    an H200 (Qwen2.5-7B's shape; benchmark/report, ``gpu-mixed``), minus the kernels' time, was 5.1 to 8.4 ms. The
    division of this sum among the terms is not measured.
    """

    front_s: float = 0.7e-3
    """Time of HTTP and tokenizer per request; requests pass one after the other."""
    front_token_s: float = 0.35e-6
    """Time of HTTP and tokenizer per prompt token."""
    step_host_s: float = 0.8e-3
    """Time from a decision to its step on the device; the overlap loop does not hide this time."""
    reply_s: float = 4e-3
    """Time for messages between processes, result, detokenizer and HTTP; delays no other request."""
    breakable_layer_s: float = 90e-6
    """Time to launch one layer with graphs that break at attention, SGLang's default for prefill."""
    slice_layer_s: float = 590e-6
    """Time to launch one layer of a sliced step, pauses included: a LAPS server on an H200 measured 16.5 ms for 28."""


def errors(known: Coefficients, rows: Sequence[StepSample]) -> dict[str, float]:
    """Return the relative errors of the fit (median, p90, worst) and the number of rows."""
    return summary([abs(known.seconds(s.shape) / s.seconds - 1.0) for s in rows])


def decode_errors(known: DecodeCost, rows: Sequence[DecodeSample]) -> dict[str, float]:
    """Return the relative errors of whole decode steps, as ``errors`` does."""
    return summary([abs(known.step_s(s.streams, s.context) / (s.rows_s + s.attention_s) - 1.0) for s in rows])


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Return median, p90 and worst of relative errors, and their number."""
    off = np.array(errors)
    return {
        "median": float(np.median(off)), "p90": float(np.quantile(off, 0.9)), "worst": float(off.max()),
        "rows": len(off),
    }  # fmt: skip


def profile(
    name: str, source: str, layers: int, rows: Sequence[StepSample], details: dict[str, Any], host: Host | None = None,
    steps: Sequence[DecodeSample] = (),
) -> Profile:  # fmt: skip
    """Return a profile. ``details``: inputs of the grid (JSON-ready). ``steps``: decode steps; empty if unknown."""
    host = host or Host()
    known = fit(rows)
    launch_s = host.breakable_layer_s * layers
    made = Profile(
        name=name,
        source=source,
        coefficients=replace(known, fixed=max(known.fixed, launch_s - known.linear * known.flat)),
        front_s=host.front_s,
        front_token_s=host.front_token_s,
        step_host_s=host.step_host_s,
        reply_s=host.reply_s,
        launch_s=launch_s,
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
    if not steps:
        return made
    cost = decode.cost(steps)
    seen = [[s.streams, s.context, float(f"{s.rows_s:.5g}"), float(f"{s.attention_s:.5g}")] for s in steps]
    more = {"decode_fit": decode_errors(cost, steps), "decode_grid": seen}
    return replace(made, decode=cost, details={**made.details, **more})
