"""The device to emulate: ``--laps-emulate PROFILE[,slow=K]``, or the same text in the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laps_core.config import ConfigError
from laps_plan.profile import Profile

from laps_emulate import ENV

FLAG = "--laps-emulate"
_SLOW = "slow="


@dataclass(frozen=True)
class DeviceSpec:
    """Profile and slowdown of a device to emulate."""

    text: str
    """PROFILE[,slow=K], as given."""
    profile: Profile
    slow: float = 1.0
    """Factor on the step times of the profile; at least 1."""

    @classmethod
    def parse(cls, text: str, where: str = FLAG) -> DeviceSpec:
        """Read PROFILE[,slow=K]; PROFILE is a name or a path. Raises ConfigError (one line, starting with `where`)."""
        name, *rest = text.strip().split(",")
        slow = 1.0
        if rest:
            slow = _number(rest[0].removeprefix(_SLOW)) if rest[0].startswith(_SLOW) else math.nan
        if len(rest) > 1 or not 1.0 <= slow < math.inf:
            raise ConfigError(f"{where}: {text!r} is not PROFILE[,slow=K] with K a number of at least 1")
        try:
            return cls(text.strip(), Profile.load(name), slow)
        except SystemExit as e:
            raise ConfigError(f"{where}: {e}") from None

    def why_not(self, args: Any) -> str | None:
        """Return why a server with these arguments cannot emulate this device, or None."""
        mode = args.disaggregation_mode or "null"
        if mode == "prefill":
            return None
        if mode != "null":
            return f"--disaggregation-mode is {mode}, not prefill"
        if getattr(args, "speculative_algorithm", None):
            return "without disaggregation no profile has steps with drafts (--speculative-algorithm)"
        known = self.profile.decode is not None and self.profile.group is None
        return None if known else f"without disaggregation a server decodes: {self.profile.name} has no decode steps"

    def warning(self) -> str:
        """Return the warning that every process of an emulated server logs first."""
        about = f"step times of {self.profile.name} ({self.profile.source}), stretched {self.slow:g} times"
        return f"EMULATED DEVICE: {about}; nothing here measures this machine or that device."


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def from_env(env: Mapping[str, str] = os.environ) -> DeviceSpec | None:
    """Return the device that the environment names, or None. Raises ConfigError."""
    text = env.get(ENV, "").strip()
    return DeviceSpec.parse(text, ENV) if text else None


def to_env(spec: DeviceSpec) -> None:
    """Pass the device on to the processes started from here."""
    os.environ[ENV] = spec.text
