"""A device that replaces the real device of a scheduler, if another package has put one there."""

from __future__ import annotations

from typing import Any

from sglang_laps.cutter import Cutter

ATTRIBUTE = "laps_emulated"
"""Attribute of a scheduler that holds its stand-in."""


class StandIn(Cutter):
    """A device that runs passes in slices itself."""

    waits: bool
    """True if a pass has ended when its call returns."""

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of the device's Prometheus series."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """Return the entry "emulated" of a server's status, ready for JSON."""
        raise NotImplementedError


def device_of(scheduler: Any) -> StandIn | None:
    """Return the stand-in for this scheduler's device; None if the device is real."""
    return getattr(scheduler, ATTRIBUTE, None)


def status(scheduler: Any) -> dict[str, Any]:
    """Return the entry "emulated" of a status; empty for a real device."""
    device = device_of(scheduler)
    return {} if device is None else {"emulated": device.status()}
