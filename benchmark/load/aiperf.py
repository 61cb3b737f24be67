"""Adapter for NVIDIA's aiperf, an independent client: finding it, running it, reading its results.

It is installed in an environment of its own and used through its command and files: a trace in Mooncake's format goes
in, a summary and the requests as sent come out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
from laps_plan.traffic.job import Job

from benchmark.rig.servers import ServerError

VERSION = "0.13.0"
VARIABLE = "AIPERF"
MISSING = f"aiperf is not installed: pip install aiperf=={VERSION} into an environment of its own, then {VARIABLE}=PATH"
BLOCK = 64
"""Tokens per hash id of a trace. Mooncake's traces have 512, more than most prompts here."""
TOKENIZER = "local/model"
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LIMIT_S = 300.0
"""Time limit of a run beyond the trace itself: aiperf loads a tokenizer and makes all prompts first."""


class Row(msgspec.Struct, frozen=True):
    """One request of a trace in Mooncake's format."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    """Tokens."""
    output_length: int
    hash_ids: tuple[int, ...] = ()
    """One id per BLOCK tokens of the prompt; equal ids stand for equal tokens."""


@dataclass(frozen=True)
class Sent:
    """One request as sent."""

    number: int
    """Number of the row in the trace."""
    payload: dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """aiperf's measurements of one run."""

    p50: float
    """TTFT (ms) of the requests with a text."""
    p90: float
    avg: float
    answered: int
    """Successful requests."""
    version: str
    """Version of aiperf."""


class _Ttft(msgspec.Struct):
    p50: float
    p90: float
    avg: float


class _Count(msgspec.Struct):
    avg: float


class _Metadata(msgspec.Struct):
    session_num: int


class _Raw(msgspec.Struct):
    metadata: _Metadata
    payload: dict[str, Any]


class _Export(msgspec.Struct):
    time_to_first_token: _Ttft
    request_count: _Count
    aiperf_version: str = ""


def lacking(environ: Mapping[str, str] = os.environ) -> str:
    """Return in one line why aiperf cannot be run here; empty = it can."""
    if _which(environ):
        return ""
    named = environ.get(VARIABLE)
    return f"{VARIABLE}={named} is no program" if named else MISSING


def found(environ: Mapping[str, str] = os.environ) -> str:
    """Return the command: the one named by AIPERF, else the one on PATH. Raises ServerError if there is none."""
    command = _which(environ)
    if not command:
        raise ServerError(lacking(environ))
    return command


def _which(environ: Mapping[str, str]) -> str | None:
    return shutil.which(environ.get(VARIABLE) or "aiperf", path=environ.get("PATH"))


def trace(jobs: Iterable[Job], answer: int) -> Iterator[Row]:
    """Yield jobs as rows; shared tokens are shared in whole blocks. ``answer``: tokens asked for."""
    own = itertools.count(1_000_000_000)
    for job in jobs:
        tokens, shared = job.cached + job.new, job.cached // BLOCK
        # Ids of streams differ from each other, and from those of tokens that are not shared.
        common = range(job.stream * 1_000_000, job.stream * 1_000_000 + shared)
        rest = itertools.islice(own, -(-tokens // BLOCK) - shared)
        yield Row(round(1e3 * job.at_s, 3), tokens, answer, (*common, *rest))


def write(rows: Iterable[Row], path: Path) -> None:
    """Write a trace file: one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.Encoder().encode_lines(list(rows)))


def command(program: str, url: str, endpoint: str, file: Path, artifacts: Path, seed: int, *, raw: bool) -> list[str]:
    """Return aiperf's command line. ``raw``: keep every request as sent, which costs time."""
    return [
        program, "profile", "--model", "model", "--url", url, "--endpoint-type", endpoint, "--streaming",
        "--tokenizer", TOKENIZER, "--input-file", str(file), "--custom-dataset-type", "mooncake_trace",
        "--isl-block-size", str(BLOCK), "--fixed-schedule", "--random-seed", str(seed),
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--workers-max", "1", "--record-processors", "1", "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        "--export-level", "raw" if raw else "summary", "--artifact-dir", str(artifacts),
    ]  # fmt: skip


def hub(tokenizer: Path, cache: Path) -> None:
    """Put a tokenizer's folder where a model hub's client would have put it, as TOKENIZER.

    aiperf's processes that make prompts from hash ids take a folder's path for the name of a model.
    """
    model = cache / f"models--{TOKENIZER.replace('/', '--')}"
    for folder in ("refs", "snapshots"):
        (model / folder).mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text("local")
    snapshot = model / "snapshots" / "local"
    snapshot.unlink(missing_ok=True)
    snapshot.symlink_to(tokenizer.resolve(), target_is_directory=True)


def environment(environ: Mapping[str, str], scratch: str, cache: Path) -> dict[str, str]:
    """Return the environment: no model hub, and temporary files in folders of ours."""
    return {
        **{k: v for k, v in environ.items() if k != "PYTHONPATH"},
        "HF_HUB_CACHE": str(cache.resolve()),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TMPDIR": scratch,
        "AIPERF_DATASET_MMAP_CACHE_DIR": str(cache.resolve() / "prompts"),
    }


def run(line: Sequence[str], log: Path, cache: Path, limit_s: float) -> None:
    """Run aiperf to its end. Raises ServerError; no process that it started survives."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # aiperf's sockets are files there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="aiperf-", ignore_cleanup_errors=True) as scratch, log.open("wb") as out:
        env = environment(os.environ, scratch, cache)
        process = psutil.Popen(
            line, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except psutil.TimeoutExpired:
            raise ServerError(f"aiperf did not end within {limit_s:.0f} s; its log: {log}") from None
        finally:
            _end(process)
    if code:
        raise ServerError(f"aiperf ended with code {code}; its log: {log}")


def _end(process: psutil.Popen) -> None:
    members = [process]
    with contextlib.suppress(psutil.NoSuchProcess):
        members += process.children(recursive=True)
    # Kill the process group, too: its leader may have died before the others.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    psutil.wait_procs(members, timeout=5.0)


def summary(artifacts: Path) -> Summary:
    """Return the summary of a run. Raises ServerError if there is none, or no first token was seen."""
    path = artifacts / "profile_export_aiperf.json"
    try:
        export = msgspec.json.decode(path.read_bytes(), type=_Export)
    except (OSError, msgspec.DecodeError) as e:
        raise ServerError(f"aiperf left no TTFT in {path}: {e}") from None
    ttft = export.time_to_first_token
    return Summary(ttft.p50, ttft.p90, ttft.avg, round(export.request_count.avg), export.aiperf_version)


def sent(artifacts: Path) -> list[Sent]:
    """Return the requests of a run with ``raw``, in the order of the trace. Raises ServerError."""
    path = artifacts / "profile_export_raw.jsonl"
    try:
        lines = msgspec.json.Decoder(_Raw).decode_lines(path.read_bytes())
    except (OSError, msgspec.DecodeError) as e:
        raise ServerError(f"aiperf left no requests in {path}: {e}") from None
    return sorted((Sent(raw.metadata.session_num, raw.payload) for raw in lines), key=lambda one: one.number)
