"""Servers of benchmarks: none is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmark.rig.servers import Server, running

STOPPED: list[str] = []


class Fake(Server):
    """Server without a process."""

    def start(self) -> Server:
        return self

    def ready(self, timeout_s: float = 0.0, tick: Callable[[], None] | None = None) -> Server:
        return self

    def stop(self) -> None:
        STOPPED.append(self.name)
        if self.name == "b":
            raise KeyboardInterrupt


def test_interrupted_stop_leaves_no_server_behind(tmp_path: Path) -> None:
    STOPPED.clear()
    servers = [Fake(name, [], 0, tmp_path / "log") for name in "abc"]
    with pytest.raises(KeyboardInterrupt), running(*servers):
        pass
    assert STOPPED == ["c", "b", "a"]
