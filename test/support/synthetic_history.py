"""Synthetic history of one prefill server, with consistent device steps, trace events and receipts."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from laps_core.length import ClassName
from laps_core.receipts.receipt import Behind, Cause, Receipt

Event = dict[str, Any]
TOKEN_S, STEP_S = 1e-4, 6e-3
"""Device time of one token, and fixed device time of one step (seconds)."""
SLICE_S = 0.06
TRANSFER_S = 5e-3
DEVICE_LANE, HOLD_LANE = 1, 2
"""Lanes of the trace."""


@dataclass
class Prompt:
    """One request. Times in seconds since the history's start."""

    rid: str
    cls: ClassName
    tokens: int
    cached: int
    at: float
    """Arrival time."""
    begun: float = 0.0
    ended: float = 0.0


@dataclass
class DevicePeriod:
    """One period of the device: a step, idle time, or a hold of the window (seconds since the history's start)."""

    kind: str
    cls: str
    begin: float
    end: float
    prompts: list[Prompt] = field(default_factory=list)
    tokens: int = 0


@dataclass
class BatchRun:
    """One batch."""

    name: str
    begin: float
    end: float
    args: Event
    slices: list[tuple[float, float]] = field(default_factory=list)


class History:
    """Steps, trace events and receipts of one DP rank of a server. It starts at Unix time `start_s`."""

    def __init__(self, start_s: float, seconds: float = 90.0, seed: int = 1, rank: int = 0) -> None:
        """`seconds`: length of the history. `rank`: DP rank."""
        self.start_s, self.rank = start_s, rank
        rng = random.Random(f"{seed} {rank}")
        prompts = [*_draw_arrivals(rng, "short", 0.05, seconds), *_draw_arrivals(rng, "long", 1.6, seconds)]
        self.prompts = sorted(prompts, key=lambda p: p.at)
        self.busy = _simulate_device(self.prompts)
        done = [p for p in self.prompts if p.ended]
        self.receipts = [self._receipt(p, rng) for p in done]
        self.runs = _collect_runs(self.busy, rng)

    def _receipt(self, p: Prompt, rng: random.Random) -> Receipt:
        causes: dict[Cause, float] = {"tokenizing": rng.uniform(0.6, 2.5)}
        behind: dict[str, list[float]] = {}
        now = p.at + 1e-3 * causes["tokenizing"]
        for b in (b for b in self.busy if b.end > now and b.begin < p.ended):
            # Time that no step covers is scheduling: the host builds and launches.
            _add_cause(causes, "scheduling", b.begin - now)
            took = min(b.end, p.ended) - max(now, b.begin)
            name: Cause = "computing" if p in b.prompts else "preempted" if now >= p.begun else _cause_of_wait(b)
            _add_cause(causes, name, took)
            if name in ("preempted", "behind_short", "behind_long"):
                for other in b.prompts:
                    entry = behind.setdefault(other.rid, [0.0, 0.0])
                    entry[0] += b.tokens / len(b.prompts)
                    entry[1] += 1e3 * took
            now = max(now, b.end)
        causes |= {"transfer": rng.uniform(2.0, 9.0), "answering": rng.uniform(0.4, 1.5)}
        most = sorted(behind.items(), key=lambda item: -item[1][1])
        ttft_ms = sum(causes.values())
        return Receipt(
            rid=p.rid, cls=p.cls, arrived_s=self.start_s + p.at, new_tokens=p.tokens, cached_tokens=p.cached,
            ttft_ms=ttft_ms, causes=causes, left_out=max(0, len(most) - 4), dp_rank=self.rank,
            behind=tuple(Behind(rid=rid, tokens=round(n), ms=ms) for rid, (n, ms) in most[:4]),
            quoted_ms=ttft_ms * rng.uniform(0.8, 1.15),
        )  # fmt: skip

    def first_token_s(self, receipt: Receipt) -> float:
        """Return the Unix time of the request's first token."""
        return receipt.arrived_s + receipt.ttft_ms / 1e3

    def trace(self, begin_s: float, end_s: float, base_us: int) -> list[Event]:
        """Return the trace events between two Unix times. Event times count from `base_us`."""
        begin, end = begin_s - self.start_s, end_s - self.start_s
        events: list[Event] = []

        def us(seconds: float) -> int:
            return round(1e6 * (seconds + self.start_s)) - base_us

        def add(tid: int, name: str, a: float, b: float, args: Event | None = None) -> None:
            if b > begin and a < end:
                ts, till = us(max(a, begin)), us(min(b, end))
                events.append({"ph": "X", "tid": tid, "name": name, "ts": ts, "dur": till - ts, "args": args or {}})

        for run in self.runs:
            add(DEVICE_LANE, run.name, run.begin, run.end, run.args)
            for since, until in run.slices:
                add(DEVICE_LANE, "slice", since, until)
        for b in self.busy:
            if b.kind in ("idle", "window"):
                add(DEVICE_LANE, "idle: window" if b.kind == "window" else "idle", b.begin, b.end)
            if b.kind == "window":
                add(HOLD_LANE, "window", b.begin, b.end)
        for n, p in enumerate(p for p in self.prompts if p.ended and begin <= p.ended + TRANSFER_S <= end):
            times = {
                f"{p.cls} request of {p.tokens} tokens": (p.at, p.ended + TRANSFER_S), "waits": (p.at, p.begun),
                "prefill in progress": (p.begun, p.ended), "transfer": (p.ended, p.ended + TRANSFER_S),
            }  # fmt: skip
            args: Event = {"rid": p.rid, "new_tokens": p.tokens, "aborted": False}
            for name, (since, until) in times.items():
                both = {"cat": f"{p.cls} requests", "id": n, "name": name, "tid": 0}
                events.append({**both, "ph": "b", "ts": us(since), "args": args})
                events.append({**both, "ph": "e", "ts": us(until), "args": {}})
                args = {}
        events.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
        lanes = {DEVICE_LANE: "device", HOLD_LANE: "short held back", HOLD_LANE + 1: "long held back"}
        names: list[Event] = [{"ph": "M", "name": "process_name", "args": {"name": f"data-parallel rank {self.rank}"}}]
        names += [{"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}} for tid, name in lanes.items()]
        return [{**e, "pid": self.rank + 1} for e in (*names, *events)]


def _collect_runs(busy: list[DevicePeriod], rng: random.Random) -> list[BatchRun]:
    """Return batches as in the trace: all slices of a long batch are one run, which also spans its preemptions."""
    runs: list[BatchRun] = []
    long_runs: dict[str, BatchRun] = {}
    for b in busy:
        if b.kind in ("idle", "window"):
            continue
        run = long_runs.get(b.prompts[0].rid) if b.kind == "slice" else None
        if run is None:
            tokens = sum(p.tokens for p in b.prompts)
            rids = [p.rid for p in b.prompts]
            args = {
                "requests": rids[:16], "request_count": len(rids), "new_tokens": tokens, "measured_ms": 0.0,
                "preempts": b.kind == "preempt",
            }  # fmt: skip
            run = BatchRun(f"{b.cls}: {len(rids)} x, {tokens} tokens", b.begin, b.end, args)
            runs.append(run)
            if b.kind == "slice":
                long_runs[rids[0]] = run
        run.end = b.end
        run.args["measured_ms"] += 1e3 * (b.end - b.begin)
        if b.kind == "slice":
            run.slices.append((b.begin, b.end))
    for run in runs:
        late = rng.random() < 0.02
        run.args["late"] = late
        run.args["predicted_ms"] = run.args["measured_ms"] / (2.4 if late else rng.uniform(0.92, 1.1))
    return runs


def _add_cause(causes: dict[Cause, float], name: Cause, seconds: float) -> None:
    if seconds > 1e-9:
        causes[name] = causes.get(name, 0.0) + 1e3 * seconds


def _cause_of_wait(b: DevicePeriod) -> Cause:
    if b.kind == "idle":
        return "scheduling"
    return "window" if b.kind == "window" else "behind_long" if b.cls == "long" else "behind_short"


def _draw_arrivals(rng: random.Random, cls: ClassName, every_s: float, seconds: float) -> list[Prompt]:
    prompts, at = [], rng.expovariate(1 / every_s)
    while at < seconds:
        tokens = rng.randint(20, 250) if cls == "short" else rng.choice((2048, 4096, 8192))
        rid = f"{rng.getrandbits(64):016x}"
        prompts.append(Prompt(rid, cls, tokens, 16 * rng.randint(0, 40), at))
        at += rng.expovariate(1 / every_s)
    return prompts


def _simulate_device(prompts: list[Prompt]) -> list[DevicePeriod]:
    """Simulate a device that runs long prompts in slices, and short ones in the pauses; return its steps."""
    coming, short, long, steps = deque(prompts), list[Prompt](), deque[Prompt](), list[DevicePeriod]()
    now, left = 0.0, 0.0
    while coming or short or long:
        while coming and coming[0].at + 2.6e-3 <= now:
            p = coming.popleft()
            (short if p.cls == "short" else long).append(p)
        inside = bool(left)
        if len(short) == 1 and not inside and coming and coming[0].cls == "short" and len(steps) % 5 == 0:
            steps.append(DevicePeriod("window", "short", now, now + 4e-3))
            now += 4e-3
        if short and (not inside or steps[-1].cls == "long"):
            tokens = sum(p.tokens for p in short)
            step = DevicePeriod(
                "preempt" if inside else "batch", "short", now, now + STEP_S + TOKEN_S * tokens, short, tokens
            )
            short = []
        elif long:
            p = long[0]
            p.begun, whole = p.begun or now, STEP_S + TOKEN_S * p.tokens
            left = left or whole
            took = min(left, SLICE_S)
            left = left - took if left - took > 1e-9 else 0.0
            step = DevicePeriod("slice", "long", now, now + took, [p], round(p.tokens * took / whole))
            if not left:
                long.popleft()
        elif coming:
            step = DevicePeriod("idle", "no request waits", now, coming[0].at + 2.6e-3)
        else:
            break
        for p in step.prompts:
            p.begun = p.begun or now
            if p.cls == "short" or not left:
                p.ended = step.end
        steps.append(step)
        now = step.end + (4e-4 if step.kind != "idle" else 0.0)
    return steps
