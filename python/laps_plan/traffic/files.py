"""Recorded traffic in published formats, which are recognised by the first line of a file."""

from __future__ import annotations

import csv
import gzip
import random
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from laps_plan.traffic import recording
from laps_plan.traffic.given import Traffic, poisson
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import wrap_conversations

Tokens = Annotated[int, msgspec.Meta(ge=0, le=4_000_000)]
Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]


class _Plain(msgspec.Struct):
    new_tokens: Tokens
    arrival_ms: Number = 0.0
    cached_tokens: Tokens = 0
    output_tokens: Tokens = 0


class _Turn(msgspec.Struct):
    session: str
    new_tokens: Tokens
    t_ms: Number
    """Time since the session's start."""
    cached_tokens: Tokens = 0
    think_ms: Number | None = None
    """Time from the previous answer to this request."""
    output_tokens: Tokens = 0


class _Azure(msgspec.Struct):
    when: str = msgspec.field(name="TIMESTAMP")
    tokens: Tokens = msgspec.field(name="ContextTokens")
    output: Tokens = msgspec.field(name="GeneratedTokens", default=0)


class _Blocks(msgspec.Struct):
    """A line of a Mooncake or Qwen-Bailian trace."""

    timestamp: Number
    input_length: Tokens
    output_length: Tokens = 0
    hash_ids: list[int | str] = []


Row = tuple[float, int, int, list[int | str], int]
"""Arrival (seconds), tokens, cached tokens, block names, and tokens of the answer (0 = unknown). Block names determine
how many of the tokens are cached."""


def _plain(lines: Iterable[str]) -> Iterator[Row]:
    for _, row in _csv(lines, _Plain):
        yield (row.arrival_ms / 1e3, row.new_tokens, row.cached_tokens, [], row.output_tokens)


def _sessions(lines: Iterable[str], seed: int) -> list[Job]:
    """Return the jobs of sessions, which start at random times of the span. A turn comes a pause after the previous
    answer, if the file has pauses; else at its recorded time, but never before that answer."""
    rng = random.Random(seed)
    sessions: dict[str, list[_Turn]] = {}
    for _, row in _csv(lines, _Turn):
        sessions.setdefault(row.session, []).append(row)
    jobs: list[Job] = []
    for stream, turns in enumerate(sessions.values()):
        begin_s, due_s, said = rng.uniform(0.0, SPAN_S), 0.0, 0
        for turn in sorted(turns, key=lambda t: t.t_ms):
            pause_s = 0.0
            if turn.think_ms is None:
                due_s = turn.t_ms / 1e3
            elif jobs and jobs[-1].stream == stream:
                pause_s = max(0.0, turn.think_ms) / 1e3 + TOKEN_S * said
                due_s += pause_s
            said = turn.output_tokens
            new, output = max(1, turn.new_tokens), max(1, said)
            at_s, cached = begin_s + due_s, turn.cached_tokens
            jobs.append(Job(at_s, new, cached, stream, continues_stream=True, pause_s=pause_s, output=output))
    return wrap_conversations(jobs, SPAN_S)


def _azure(lines: Iterable[str]) -> Iterator[Row]:
    for n, row in _csv(lines, _Azure):
        try:
            when = datetime.fromisoformat(row.when)
        except ValueError:
            raise ValueError(f"line {n}: TIMESTAMP {row.when!r} is no time") from None
        # Without a zone the time is UTC: in a local zone the end of summer time would repeat an hour.
        at_s = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        yield (at_s, row.tokens, 0, [], row.output)


def _csv(lines: Iterable[str], kind: Any) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(lines)
    for row in reader:
        try:
            # An empty cell counts as a missing cell, but a request without a time among others with times has no place.
            if row.get("arrival_ms") == "":
                raise ValueError(f"line {reader.line_num}: arrival_ms is empty")
            yield reader.line_num, msgspec.convert({k: v for k, v in row.items() if k and v}, kind, strict=False)
        except msgspec.ValidationError as e:
            raise ValueError(f"line {reader.line_num}: {e}") from None


def _blocks(unit_s: float) -> Callable[[Iterable[str]], Iterator[Row]]:
    def read(lines: Iterable[str]) -> Iterator[Row]:
        decode = msgspec.json.Decoder(_Blocks).decode
        for n, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                row = decode(line)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
                raise ValueError(f"line {n}: {e}") from None
            yield (row.timestamp * unit_s, row.input_length, 0, row.hash_ids, row.output_length)

    return read


def _recorded(lines: Iterable[str]) -> Iterator[Row]:
    _, requests = recording.lines_of(lines)
    for r in requests:
        yield (r.arrival_ms / 1e3, r.new_tokens, r.cached_tokens, [], r.output_tokens)


SESSIONS = "sessions"
_FLAT: dict[str, tuple[Callable[[Iterable[str]], Iterator[Row]], int]] = {
    "csv": (_plain, 0),
    "azure": (_azure, 0),
    "mooncake": (_blocks(1e-3), 512),
    "bailian": (_blocks(1.0), 16),
    "recording": (_recorded, 0),
}
"""Reader of each format, and tokens of a block; 0 = the format has no blocks."""
FORMATS = (*_FLAT, SESSIONS)
TOKEN_S = 0.02
"""Time per token of an answer until the client of a session has the whole answer (seconds)."""
SPAN_S = 4 * 3600.0
"""Time over which the starts of sessions are spread (seconds)."""
DRAWN = (
    "The times at which sessions start are drawn, over four hours; within a session a request follows the answer to "
    "the one before it."
)
INFINITE = (
    "What is cached is the longest prefix that came before, in a cache that never forgets and all servers share: real "
    "servers compute more."
)


def kind_of(first: str) -> str:
    """Return the format of a file with this first line. Raises ValueError."""
    if first.lstrip().startswith("{"):
        try:
            found = msgspec.json.decode(first)
            keys = set(found)
        except (msgspec.MsgspecError, RecursionError) as e:
            raise ValueError(f"line 1: {e}") from None
        if {"timestamp", "input_length"} <= keys:
            return "bailian" if "chat_id" in keys else "mooncake"
        if found.get("kind") == recording.KIND:
            return "recording"
    else:
        heads = set(next(csv.reader([first]), []))
        if {"session", "t_ms", "new_tokens"} <= heads:
            return SESSIONS
        if "new_tokens" in heads:
            return "csv"
        if {"TIMESTAMP", "ContextTokens"} <= heads:
            return "azure"
    raise ValueError(f"line 1: none of the formats {', '.join(FORMATS)}")


def read(path: Path, kind: str | None = None, seed: int = 0) -> Traffic:
    """Return the traffic of a file, which can be compressed (gzip). ``kind``: its format; None: recognised by the first
    line. ``seed``: for random times.

    Raises ValueError or OSError, in one line that names the file, and the broken line if there is one.
    """
    try:
        with _opened(path) as f:
            kind = kind or kind_of(f.readline())
            f.seek(0)
            jobs = _sessions(f, seed) if kind == SESSIONS else None
            reader, block = _FLAT["csv" if kind == SESSIONS else kind]
            rows = [] if jobs else sorted(reader(f), key=lambda row: row[0])
    except (ValueError, EOFError, csv.Error, zlib.error) as e:
        raise ValueError(f"{path}: {e}") from None
    if len(jobs or rows) < 2:
        raise ValueError(f"{path}: {len(jobs or rows)} requests; at least 2 are needed")
    what = f"{path.name} ({kind})"
    if jobs is not None:
        first_s = jobs[0].at_s
        return Traffic([replace(job, at_s=job.at_s - first_s) for job in jobs], what, (DRAWN,))
    first_s = rows[0][0]
    cached = _prefixes(block)
    jobs = []
    for at, tokens, known, names, output in rows:
        if block:
            known = min(cached(names), tokens - 1)
            tokens -= max(0, known)
        jobs.append(Job(at - first_s, max(1, tokens), max(0, known), output=max(1, output)))
    notes = (INFINITE,) if block else ()
    if rows[-1][0] > first_s:
        return Traffic(jobs, what, notes)
    lengths = iter([(job.new, job.cached) for job in jobs])
    drawn = poisson(lambda rng: next(lengths), len(jobs), what, timed=False)
    timed = [replace(job, at_s=at.at_s) for job, at in zip(jobs, drawn.jobs, strict=True)]
    return replace(drawn, jobs=timed, notes=(*notes, *drawn.notes))


def _opened(path: Path) -> IO[str]:
    with path.open("rb") as f:
        packed = f.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _prefixes(block: int) -> Callable[[list[int | str]], int]:
    """Return a function that takes the block names of each prompt in turn, and returns the tokens of leading blocks
    that an earlier prompt had, too."""
    # A block counts only after the same earlier blocks: the same text elsewhere is another entry of the cache.
    nodes: dict[tuple[int, Hashable], int] = {}

    def cached(names: list[int | str]) -> int:
        node = found = 0
        for name in names:
            following = nodes.get((node, name))
            if following is None:
                following = nodes[node, name] = len(nodes) + 1
            else:
                found += block
            node = following
        return found

    return cached
