"""The LAPS flags of the prefill server, and how their values reach its scheduler processes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from sglang_laps.policy.config import AUTO, ConfigError, LapsConfig

ENV = "SGLANG_LAPS_SCHEDULER"
"""Set by the launcher from the flags, read in every scheduler process; ``sgl.Engine`` users set it themselves.

The value is the JSON text of the knobs, or 1 for all defaults."""

ENABLE = "--enable-laps-scheduler"
_FIELDS: dict[str, type] = {"length_threshold": int, "length_basis": str}
"""LapsConfig fields that are flags of their own, and how their text is read."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group "LAPS". Values stay text here: a bad one is refused in one line, not below a page of usage."""
    group = parser.add_argument_group("LAPS", "Length-aware prefill scheduling (prefill servers only)")
    group.add_argument(ENABLE, action="store_true", help="Prefill short and long prompts apart.")
    group.add_argument(
        "--laps-length-threshold",
        metavar="TOKENS",
        help="Longest short request, in new tokens (default: 256); auto takes it from the fitted latency model.",
    )
    group.add_argument(
        "--laps-length-basis",
        metavar="{uncached,prompt}",
        help="What counts: tokens not found in the prefix cache, or the whole prompt (default: uncached).",
    )
    group.add_argument("--laps-config", metavar="JSON", help="Any other knob, as a JSON object; see docs/LAPS.md.")


def given(args: argparse.Namespace) -> dict[str, str]:
    """LAPS flags with a value on this command line: field (or ``config``) -> text."""
    names = [*_FIELDS, "config"]
    values = {name: getattr(args, f"laps_{name}", None) for name in names}
    return {name: text for name, text in values.items() if text is not None}


def from_args(args: argparse.Namespace) -> LapsConfig:
    """The configuration on this command line. Raises ConfigError."""
    texts = given(args)
    extra = texts.pop("config", None)
    return LapsConfig.parse({name: _read(name, text) for name, text in texts.items()}, extra)


def _read(name: str, text: str) -> Any:
    kind = _FIELDS[name]
    if kind is str or text == AUTO:
        return text
    try:
        return kind(text)
    except ValueError:
        return text  # refused by the field's own check, which names the flag


def from_env(env: Mapping[str, str] = os.environ) -> LapsConfig | None:
    """The configuration in the environment, None where there is none. Raises ConfigError."""
    text = env.get(ENV, "").strip()
    if text in ("", "0"):
        return None
    if text == "1":
        return LapsConfig()
    try:
        return LapsConfig.parse({}, text)
    except ConfigError as e:
        raise ConfigError(f"{ENV}: {e}") from None


def to_env(config: LapsConfig) -> None:
    """Hand the configuration to the processes started from here."""
    os.environ[ENV] = json.dumps(config.as_dict())
