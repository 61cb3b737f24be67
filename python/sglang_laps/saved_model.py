"""The latency model in a file: read at start, written when the server is idle."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

from laps_core.config import ConfigError
from laps_core.latency.model import LatencyModel
from laps_plan.profile import Profile, names

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
"""Least time between two writes (seconds)."""


def load(path: str | None) -> LatencyModel:
    """Read a file that ``save`` wrote, or the profile of a device. Return a new model if `path` is None or, in an
    existing folder, names no file yet. A name without "/" and ".json" that is neither is taken as misspelt.

    Raises ConfigError.
    """
    if path is None:
        return LatencyModel()
    told = f"--laps-config: profile: {path}"
    try:
        if device := Profile.find(path):
            return LatencyModel(device.coefficients)
    except ValueError as e:
        raise ConfigError(f"--laps-config: {e}") from None
    except RecursionError:
        raise ConfigError(f"{told}: not JSON") from None
    try:
        text = Path(path).read_text("utf-8")
    except FileNotFoundError:
        if "/" not in path and not path.endswith(".json"):
            known = ", ".join(names())
            raise ConfigError(f"{told}: no such profile; known: {known}; a new file needs .json or a folder") from None
        if not Path(path).parent.is_dir():
            raise ConfigError(f"{told}: there is no such folder") from None
        return LatencyModel()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not text"
        raise ConfigError(f"{told}: {reason}") from None
    # A machine that lost power while a server saved can leave an empty file.
    return LatencyModel.from_json(text, told) if text else LatencyModel()


def save(model: LatencyModel, path: str) -> None:
    """Write the whole file or nothing. Raises OSError."""
    # A starting server can read the file, and this process can end, at any moment.
    # Containers that share the file can have equal process ids.
    half = f"{path}.{socket.gethostname()}.{os.getpid()}.tmp"
    try:
        Path(half).write_text(model.to_json(), "utf-8")
        os.replace(half, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(half)
        raise


class Saver:
    """Writes one model to one file, as the model learns."""

    def __init__(self, model: LatencyModel, path: str | None) -> None:
        """`path`: None = never write. The profile of a device is never overwritten."""
        self._model, self._path = model, None if path and Profile.find(path) else path
        self._at_s: float | None = None
        self._observed = 0

    def when_due(self, now: float) -> None:
        """Save the model at `now` (seconds) if it has learned since, at most every PERIOD_S; call it when idle."""
        model = self._model
        if self._path is None or not model.fitted or model.observed == self._observed:
            return
        if self._at_s is not None and now - self._at_s < PERIOD_S:
            return
        self._at_s, self._observed = now, model.observed
        try:
            save(model, self._path)
        except OSError as e:
            logger.warning("LAPS: the latency model could not be saved to %s: %s", self._path, e.strerror)
