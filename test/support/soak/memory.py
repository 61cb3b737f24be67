"""Memory of processes over time, and the growth of each."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

EVERY_S = 30.0
"""Time between two samples (seconds)."""
WINDOW_S = 60.0
"""Length of the window whose median sample counts as the memory at a time (seconds)."""
MAX_RATIO = 1.05
"""Largest ratio of the memory at the end to the memory after the run-in."""


@dataclass(frozen=True)
class Sample:
    """One process at one time. Memory in KiB."""

    at_s: float
    """Time since the start of the load."""
    own: int
    """Resident anonymous pages, with shared pages divided among their processes. File pages are left out, because their
    division depends on other running programs. All resident pages if the system does not report anonymous pages."""
    pss: int | None
    """All resident pages, with shared pages divided; None if unknown."""
    private: int | None
    """Resident and unshared pages."""
    threads: int
    descriptors: int
    cpu_s: float
    """User and system time since the process started."""


@dataclass(frozen=True)
class Growth:
    """Memory of one process after the run-in and at the end."""

    name: str
    before: float | None
    """Memory after the run-in (KiB); None if there is no sample because the process did not run."""
    after: float | None
    """Memory at the end (KiB); None if there is no sample."""

    @property
    def ratio(self) -> float | None:
        """Memory at the end over that after the run-in; None if unknown."""
        return self.after / self.before if self.before and self.after else None

    @property
    def acceptable(self) -> bool:
        """Return True if the process ran all the time and has not grown beyond the bar; shrinking is no leak."""
        return self.ratio is not None and self.ratio <= MAX_RATIO

    def __str__(self) -> str:
        if self.ratio is None or self.before is None or self.after is None:
            return f"{self.name}: {'not there after the run-in' if self.before is None else 'not there at the end'}"
        return f"{self.name}: {self.before / 1024:.1f} MiB, then {self.after / 1024:.1f} ({self.ratio - 1:+.1%})"


def parse_rollup(text: str) -> tuple[int, int, int]:
    """Return (anonymous, PSS, private) in KiB from the text of smaps_rollup. Raises KeyError, ValueError."""
    rows = (line.split() for line in text.splitlines()[1:])
    kib = {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) >= 2}
    return kib["Pss_Anon"] + kib["Pss_Shmem"], kib["Pss"], kib["Private_Clean"] + kib["Private_Dirty"]


def sample(process: psutil.Process, at_s: float) -> Sample | None:
    """Return a sample of a process now; None if it has ended."""
    try:
        memory: tuple[int, int | None, int | None] = process.memory_info().rss // 1024, None, None
        with contextlib.suppress(OSError, KeyError, ValueError):
            memory = parse_rollup(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
        with process.oneshot():
            used = process.cpu_times()
            return Sample(at_s, *memory, process.num_threads(), process.num_fds(), used.user + used.system)
    except psutil.Error:
        return None


def process_name(process: psutil.Process, server: str, first: bool) -> str:
    """Return the name of a process: its server, and its role there from SGLang's process title."""
    with contextlib.suppress(psutil.Error):
        title = " ".join(process.cmdline())
        for kind in ("scheduler", "detokenizer", "tokenizer", "resource_tracker"):
            if f"sglang::{kind}" in title or (kind == "resource_tracker" and kind in title):
                return f"{server}: {kind}"
    return f"{server}: {'server' if first else f'process {process.pid}'}"


class Record:
    """Samples of all processes, by name."""

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        self._processes = dict(processes)
        self.samples: dict[str, list[Sample]] = {name: [] for name in processes}

    def take_samples(self, at_s: float) -> None:
        """Take one sample of each running process."""
        for name, process in self._processes.items():
            if (one := sample(process, at_s)) is not None:
                self.samples[name].append(one)

    def growth(self, run_in_s: float, end_s: float) -> list[Growth]:
        """Return the growth of each process from after the run-in to the end."""
        return [
            Growth(name, _median(some, run_in_s, run_in_s + WINDOW_S), _median(some, end_s - WINDOW_S, end_s))
            for name, some in self.samples.items()
        ]

    def cores(self) -> float:
        """Return the mean number of cores that the processes kept busy together."""
        spans = (some for some in self.samples.values() if len(some) > 1)
        return sum((s[-1].cpu_s - s[0].cpu_s) / max(1e-9, s[-1].at_s - s[0].at_s) for s in spans)

    def raw(self) -> dict[str, list[dict[str, Any]]]:
        """Return the samples, JSON-ready."""
        return {name: [asdict(s) for s in some] for name, some in self.samples.items()}


def _median(samples: Sequence[Sample], begin_s: float, end_s: float) -> float | None:
    within = [s.own for s in samples if begin_s <= s.at_s <= end_s]
    return float(statistics.median(within)) if within else None


def sample_times(end_s: float, every_s: float = EVERY_S) -> Iterator[float]:
    """Yield the times of samples: from 0 on, and at the end (seconds)."""
    n = 0
    while (at := n * every_s) < end_s:
        yield at
        n += 1
    yield end_s
