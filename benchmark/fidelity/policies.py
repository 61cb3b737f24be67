"""Real schedulers on an emulated device: stock policies against LAPS, and the simulator's accuracy.

Real prefill servers run on this machine, with steps that last as long as the profile says (``--laps-emulate``). The
load has 95% LMSYS lengths up to 256 tokens and 5% of 1,024 to 8,192, at shares of stock fcfs's capacity. The simulator
runs the same arrivals with the profile and this machine's host time. The host time is measured first, with a training
load and with lone requests (without the overlap loop, which hides a part of it). Ratios between policies are those of
the device; times are stretched and include this machine's host.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from laps_plan.profile import Profile
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import Closed

from benchmark.fidelity.compare import KEYS, MEAN, RATE, SLOWDOWN, Accuracy, Round, Simulator, drawn, measure
from benchmark.fidelity.host import Host, LoneRequests
from benchmark.load import Prompts, Target
from benchmark.results import Column, Command, Comparison, Figure, Namespace, Parser, Piece, Table, bars, take_turns
from benchmark.results.pictures import against
from benchmark.rig import BUILT_IN, FCFS, LAPS, SMALL, STOCK, Device, Fleet, Variant, devices, get_json
from benchmark.sim.loads import MIX

OTHERS = (*STOCK, SMALL)
POLICIES = (*OTHERS, LAPS)
JUDGED = 0.7
"""Load at which policies are judged against each other, as a share of stock fcfs's capacity."""
LOADS = (JUDGED, 0.5, 0.85)
LONE = Variant("fcfs, lone requests", ("--schedule-policy", FCFS, devices.NORMAL_LOOP))
"""Variant whose lone requests show the host time. The overlap loop would hide the host time of a step."""
TRAINING_S = 15.0
CLIENTS = 256
"""Clients of the closed loop in which the simulator measures stock fcfs's capacity."""
STEPS = (
    Column("steps", ("steps",)), Column("median", ("lasted_over_profile", "median"), ".4f"),
    Column("P99", ("lasted_over_profile", "p99"), ".3f"), Column("overrun", ("overrun",)),
    Column("tiny model's share", ("host_share",), ".1%"),
)  # fmt: skip
"""Columns of the emulator's own error."""


def options(p: Parser) -> None:
    devices.add_device(p, devices.H200)


def capacity(profile: Profile, chunk: int, seed: int) -> float:
    """Return the simulated capacity of stock fcfs (requests/s)."""
    done = Simulator(profile, chunk).run(FCFS, Closed(MIX, CLIENTS, 4000, seed))
    return done.steady(CLIENTS).require(FCFS).requests_per_s


def emulator(target: Target) -> dict[str, Any]:
    """Return a server's statistics of its emulated device."""
    states = (get_json(target, "/server_info") or {}).get("internal_states") or [{}]
    return dict(states[0].get("emulated") or {})


def judged(load: Accuracy) -> list[Figure]:
    """Return ratios of LAPS to the best stock policy; of requests/s and long P90, ratios to fcfs."""
    seen, figures = load.measured, []
    for key, bar, base in (
        ("short P90", bars.EMULATED_SHORT_P90, None), (MEAN, bars.EMULATED_MEAN, None),
        (SLOWDOWN, bars.EMULATED_SLOWDOWN, None), (RATE, bars.EMULATED_RATE, FCFS),
        ("long P90", bars.EMULATED_LONG_P90, FCFS),
    ):  # fmt: skip
        of = base or seen.best(OTHERS, key)
        assert of is not None
        words = of if base else f"{of}, the best of stock"
        figures.append(seen.figure(f"{key}, {LAPS} / {words}", LAPS, of, (key,), bar))
    return figures


def steps(emulators: Mapping[str, Mapping[str, Any]]) -> tuple[Table, list[Figure]]:
    """Return a table and figures of the emulator's own error on each server."""
    seen = Comparison({name: [of] for name, of in emulators.items()})
    figures = [
        Figure.of(f"step as it lasted over the profile, {name}, median", seen.median(name, *STEPS[1].path), bars.STEP)
        for name in emulators
    ]
    note = "Steps as they lasted over the profile's; overrun: the tiny model alone took longer."
    return seen.table("The emulator's own error", "", STEPS, note), figures


def run(args: Namespace) -> Piece:
    device: Device = args.device
    known = Profile.load(device.laps["profile"])
    prompts, variants = Prompts(device.vocabulary, args.seed, device.longest), [LONE, *(BUILT_IN[p] for p in POLICIES)]
    rounds: dict[float, list[list[Job]]] = {}
    seen: dict[float, dict[str, list[Round]]] = {}
    with Fleet(device, variants, prompts, args.out, args.say, together=True) as fleet:
        args.say("lone requests")
        host = Host(known, device.chunk, LoneRequests.measure(fleet, LONE.name, args.seed))
        rate = capacity(host.profile(1.0), device.chunk, args.seed)
        args.say(f"training load; stock fcfs can do {rate:.1f} requests/s")
        training = drawn(MIX, 0.6 * rate, TRAINING_S, f"{args.seed} training")
        trained = measure(fleet, FCFS, training, args.seed)["ttft"]
        for load in LOADS:
            count = args.rounds if load == JUDGED else 1
            jobs = [drawn(MIX, load * rate, args.seconds, f"{args.seed}/{load}/{i}") for i in range(count)]

            def once(i: int, name: str, jobs: list[list[Job]] = jobs) -> Round:
                return measure(fleet, name, jobs[i], args.seed + i)

            rounds[load], seen[load] = jobs, take_turns(POLICIES, count, once, args.say, f"{load:g}: ")
        emulators = {p: emulator(fleet.prefill(p)) for p in POLICIES}
    calibrated = host.profile_under_load(FCFS, training, trained)
    simulator = Simulator(calibrated, device.chunk, device.knobs)
    loads = {load: simulator.compare(rounds[load], of, args.seed) for load, of in seen.items()}
    tables, figures = [], judged(loads[JUDGED])
    for load, one in loads.items():
        tables.append(one.table(f"At {load:.0%} of what stock fcfs can do: TTFT in ms, emulated / simulated"))
        name = f"{{policy}} at {load:.0%}, {{key}}: simulated / emulated"
        figures += one.ratios(name, dict.fromkeys(KEYS, bars.EMULATED))
    error, lasted = steps(emulators)
    shown = {f"{policy} {load:.0%}": one.seconds(policy) for load, one in loads.items() for policy in POLICIES}
    against(shown, args.out / "emulated.svg")
    text = (
        f"Real prefill servers of this machine, SGLang's overlap loop, with {device.what}. "
        "95% LMSYS lengths up to 256 tokens, 5% of 1,024 to 8,192, Poisson, rounds of "
        f"{args.seconds:g} s, {args.rounds} at {JUDGED:.0%} and one at the other loads; stock fcfs can do "
        f"{rate:.1f} requests/s (simulated). Chunks of {device.chunk} tokens. Host beside the device: "
        f"{1e3 * (calibrated.front_s + calibrated.reply_s):.1f} ms a request, "
        f"{1e3 * (calibrated.step_host_s + calibrated.poll_s):.1f} ms a step."
    )
    data = {
        "device": device.name, "rate_per_s": rate, "emulator": emulators,
        "host": calibrated.details, "seconds": shown,
    }  # fmt: skip
    captions = {"emulated.svg": "Simulated and emulated TTFT on the same arrivals."}
    title, told = f"Emulated: {known.name}", [*figures, *lasted]
    return Piece(args.out.name, title, text, args.seed, [*tables, error], told, captions, data)


COMMAND = Command(
    "benchmark.fidelity.policies", __doc__, run, options, out="emulated", rounds=3, seed=1, seconds=40.0, every=True
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
