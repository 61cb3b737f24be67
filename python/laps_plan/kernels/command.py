"""laps-profile: predict the step times of a model on a device, from kernels that NVIDIA measured.

    laps-profile --system h200_sxm --model Qwen/Qwen3-8B --tp 1

It needs AIConfigurator (pip install 'sglang-laps[profile]', 850 MB, best in a virtual environment of its own). The
profile is a file for laps-plan (--profile), for an emulated server (--laps-emulate), and for a server that should know
its step times from the start (--laps-config '{"profile": FILE}').
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from laps_plan.kernels import decode, fit, grid
from laps_plan.profile import FOLDER, Profile

BACKEND = "sglang"
KEPT = [(s, f"Qwen/Qwen3-{m}", tp) for s in ("h100_sxm", "h200_sxm") for m in ("8B", "32B", "30B-A3B") for tp in (1, 2)]
"""(system, model, TP) of the profiles that come with the package."""


class ProfileError(Exception):
    """Reason why there is no profile, in one line."""


def profile_name(system: str, model: str, tp: int) -> str:
    """Return the name of the profile, such as ``h200-qwen3-8b``, or ``h200-qwen3-8b-tp2`` for two devices."""
    device = system.removesuffix("_sxm")
    short = re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower())
    return f"{device}-{short}" + (f"-tp{tp}" if tp > 1 else "")


def fit_profile(system: str, model: str, tp: int) -> Profile:
    """Return a profile fitted to the kernel times of AIConfigurator. Raises ProfileError."""
    try:
        from aiconfigurator.cli.api import cli_estimate
        from aiconfigurator_core.sdk.utils import get_model_config_from_model_path
    except ImportError:
        raise ProfileError("AIConfigurator is not installed: pip install 'sglang-laps[profile]'") from None
    # AIConfigurator logs every table that it reads.
    logging.disable(logging.WARNING)
    used: dict[str, Any] = {}

    def estimate(mode: str, **what: int) -> Any:
        found = cli_estimate(
            model, system, backend_name=BACKEND, mode=mode, tp_size=tp, moe_tp_size=tp, moe_ep_size=1, **what
        )
        used["backend_version"] = found.backend_version
        return found.summary

    @cache
    def kernels(new: int, old: int, n: int) -> dict[str, float]:
        found = estimate("static_ctx", isl=new + old, prefix=old, batch_size=n, osl=1)
        return {name: ms / 1e3 for name, ms in found.get_context_latency_dict().items()}

    def generation(n: int, each: int) -> dict[str, float]:
        # The prefill makes the first of the two output tokens.
        found = estimate("static_gen", isl=each, batch_size=n, osl=2)
        return {name: ms / 1e3 for name, ms in found.get_generation_latency_dict().items()}

    try:
        layers = int(get_model_config_from_model_path(model)["layers"])
        rows = grid.samples(kernels)
        steps = decode.samples(generation)
    except Exception as e:  # AIConfigurator raises various errors for a model or a device without data
        raise ProfileError(f"{model} on {system}, TP {tp}: {' '.join(str(e).split())[:300]}") from None
    aic = version("aiconfigurator")
    return fit.profile(
        profile_name(system, model, tp),
        f"kernels measured by NVIDIA (AIConfigurator {aic}: {BACKEND} {used['backend_version']} on {system}); host "
        "times assumed",
        layers,
        rows,
        {"system": system, "model": Path(model).name, "tensor_parallel": tp, "aiconfigurator": aic, **used},
        steps=steps,
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        "laps-profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--system", default="h200_sxm", help="h100_sxm, h200_sxm, b200_sxm, ...: a device of AIConfigurator")
    p.add_argument("--model", default="Qwen/Qwen3-8B", help="a name, or a folder with its config.json")
    p.add_argument("--tp", type=int, default=1, help="devices that share a server's model (default: 1)")
    p.add_argument("--out", type=Path, default=Path(), help="folder for NAME.json (default: here)")
    p.add_argument("--kept", action="store_true", help="make the profiles that come with the package again, in place")
    args = p.parse_args(argv)
    wanted = KEPT if args.kept else [(args.system, args.model, args.tp)]
    try:
        for system, model, tp in wanted:
            save_and_report(fit_profile(system, model, tp), FOLDER if args.kept else args.out)
    except (ProfileError, OSError) as e:
        print(f"laps-profile: {e}", file=sys.stderr)
        return 1
    return 0


def save_and_report(made: Profile, folder: Path) -> None:
    """Save a profile, and print its fit errors."""
    path = folder / f"{made.name}.json"
    made.save(path)
    for what, name in (("batches", "fit"), ("decode steps", "decode_fit")):
        off = made.details[name]
        print(f"{path}: error over {off['rows']} {what}: median {off['median']:.1%}, P90 {off['p90']:.1%}")
        if off["median"] > fit.MEDIAN or off["p90"] > fit.P90:
            print(f"laps-profile: that is over {fit.MEDIAN:.0%} or {fit.P90:.0%}: a rough profile", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
