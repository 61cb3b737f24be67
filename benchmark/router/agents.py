"""Coding agents behind the routers: cached prefixes kept, and waits of short turns among long ones."""

from __future__ import annotations

import random
import re
import statistics
import urllib.request
from collections.abc import Sequence
from typing import Any

from laps_plan.profile import Profile
from laps_plan.traffic import turns
from laps_plan.traffic.job import LONG, SHORT, Job
from laps_plan.traffic.turns import Turn

from benchmark.load import Prompts, Target
from benchmark.results import FAILED, Column, Comparison, Figure, Namespace, Piece, bars, brief, take_turns
from benchmark.rig import LAPS as LAPS_PREFILL
from benchmark.rig import Device, devices, model
from benchmark.router import KEYED, LAPS, MANUAL, TTFT, best_other, site

SYSTEM_TOKENS, SYSTEMS = 8192, 4
"""System prompts with tools, each shared by some of the sessions."""
EACH = 11
"""Consecutive turns of a recorded session that are replayed."""
PAUSE_S, TOKEN_S = 8.0, 0.01
"""Longest client pause, and time per output token (seconds)."""
ANSWER_TOKENS = 2
RUN_IN = 0.2
"""Share of a round before requests are counted, because sessions start one after another."""
DEVICE = "h200-qwen3-8b,slow=4"
"""Emulated device, slow enough that two cores keep up with several servers."""
NAMED = "laps, sessions named"
CACHE_AWARE = "gateway, cache-aware"
WAYS = {LAPS: (LAPS, False), NAMED: (LAPS, True), CACHE_AWARE: (CACHE_AWARE, False), MANUAL: (MANUAL, True)}
"""Name -> router, and True if sessions are named."""
_CACHED = re.compile(rb"^sglang:cached_tokens_total\{.*\} ([0-9.e+]+)$", re.MULTILINE)


def rebased(session: Sequence[Turn]) -> list[Turn]:
    """Return the turns with a system prompt in place of everything before them."""
    first = session[0].cached
    return [t._replace(cached=max(0, t.cached - first) + SYSTEM_TOKENS) for t in session]


def work_s(jobs: Sequence[Job], profile: Profile) -> float:
    """Return the time of the jobs on a device of the profile (seconds), if all histories are cached."""
    c = profile.coefficients
    return sum(c.step_s + c.work_s(job.new, job.cached) for job in jobs)


def arrivals(longest: int, share: float, devices: float, span_s: float, profile: Profile, seed: str) -> list[Job]:
    """Return jobs of sessions that start at Poisson times. ``share``: load over the capacity of ``devices`` devices of
    the profile."""
    rng = random.Random(seed)
    sessions = turns.agents(longest - SYSTEM_TOKENS, PAUSE_S, TOKEN_S)
    sample = [rebased(s) for _, s in turns.stretches(sessions, EACH, 10.0, 200.0, random.Random(0))]
    every = turns.jobs((0.0, s) for s in sample)
    rate = share * devices * len(every) / work_s(every, profile)
    begun = [(at, rebased(s)) for at, s in turns.stretches(sessions, EACH, rate, span_s, rng)]
    return [job for job in turns.jobs(begun) if job.at_s < span_s]


def prompts(longest: int, seed: int) -> Prompts:
    """Return prompts in which the turns of a session are prefixes of one stream, which starts with a system prompt."""
    return Prompts(model.VOCABULARY, seed, longest, True, False, ANSWER_TOKENS, SYSTEMS, SYSTEM_TOKENS)


def kept_at_best(jobs: Sequence[Job]) -> int:
    """Return the number of tokens that one unlimited cache would serve if the jobs came in this order."""
    held: dict[int, int] = {}
    systems: set[int] = set()
    total = 0
    for job in jobs:
        system = job.stream % SYSTEMS
        have = held.get(job.stream, SYSTEM_TOKENS if system in systems else 0)
        total += min(have, job.cached + job.new - 1)
        systems.add(system)
        held[job.stream] = max(have, job.cached + job.new)
    return total


def cached_tokens(prefills: Sequence[Target]) -> float:
    """Return the number of tokens that the servers have found in their prefix caches since they started."""
    total = 0.0
    for target in prefills:
        with urllib.request.urlopen(target.url + "/metrics", timeout=30) as reply:
            total += sum(float(x) for x in _CACHED.findall(reply.read()))
    return total


def run(args: Namespace) -> Piece:
    """Run all routers in front of prefill servers with LAPS on an emulated device. Raises ServerError or
    ConnectionError."""
    device: Device = args.device if args.device.emulated else devices.emulated(DEVICE)
    count, seconds = args.prefill or 4, args.seconds or 120.0
    profile, names = Profile.load(device.laps["profile"]), sorted({router for router, _ in WAYS.values()})
    pool = ("--max-total-tokens", str(devices.POOL_TOKENS), "--enable-metrics", "--enable-cache-report")
    with site(
        device, device.checkpoint(), LAPS_PREFILL, count, names, args.out, args.say, prefill=pool,
        decode=("--max-total-tokens", "4194304"),
    ) as up:  # fmt: skip

        def once(i: int, name: str) -> dict[str, Any]:
            router, named = WAYS[name]
            jobs = arrivals(device.longest, args.share, count, seconds, profile, f"agents {i}")
            key = (KEYED, f"session-{i}-") if named else None
            bodies = prompts(device.longest, 1 + i).bodies(jobs, 1 + i, key)
            before = cached_tokens(up.prefills)
            answers = up.replay(router, jobs, bodies)
            kept = (cached_tokens(up.prefills) - before) / kept_at_best(jobs)
            counted = [a for a in answers if a.job.at_s >= RUN_IN * seconds]
            mean_ms = 1e3 * statistics.fmean(a.ttft_s for a in counted if a.ttft_s is not None)
            failed = sum(a.ttft_s is None for a in answers)
            return {**brief(counted), "mean_ms": mean_ms, "kept": kept, "failed": failed}

        seen = take_turns(tuple(WAYS), args.rounds, once, args.say)
    settings = {"prefill": count, "share": args.share, "seconds": seconds, "device": device.what}
    found = Comparison(seen)
    judged = [Figure.of(f"cached tokens kept, {name}", found.median(name, "kept"), bars.KEPT) for name in (LAPS, NAMED)]
    for kind, bar in ((SHORT, bars.AGENTS_BEHIND_ROUTER), (LONG, None)):
        best = best_other(found, kind, {LAPS, NAMED})
        text = f"{kind} P90 TTFT of agents, {{}} / {best} (the gateway's best)"
        judged += [found.figure(text.format(name), name, best, (kind, "p90_ms"), bar) for name in (LAPS, NAMED)]
    columns = (*TTFT, Column("mean", ("mean_ms",)), Column("kept", ("kept",), ".1%"), FAILED)
    text = (
        f"{count} prefill servers with LAPS, each with {device.what}, and a decode server. "
        f"Sessions of {EACH} turns of recorded coding agents on {SYSTEMS} system prompts of {SYSTEM_TOKENS} tokens, "
        f"pauses cut to {PAUSE_S:g} s; {args.share:.0%} of what the devices can do where all is cached that can "
        f"be; {seconds:g} s a round, the same arrivals behind all routers, in turns. Named: each request "
        f"names its session in {KEYED}. gateway: SGLang's Rust gateway with the prefill policy that is named; it has "
        "none by consistent hashing. Medians over rounds. Kept: tokens found in the servers' caches, of those that one "
        "cache without a limit would have."
    )
    table, data = found.table("TTFT (ms) and cached tokens", "router", columns), {**settings, "rounds": seen}
    return Piece("router-agents", "Coding agents behind the routers", text, 1, [table], judged, data=data)
