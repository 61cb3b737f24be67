"""Servers that prefill and decode: LAPS against SGLang's settings, in the simulator.

python -m benchmark.sim.colocated                             Qwen3-8B, 30B-A3B and 32B on H200
python -m benchmark.sim.colocated --models 8b --requests 600  one of them, quickly
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from laps_core.latency.step import StepShape
from laps_core.policy.decode import LEAST_TARGET_S, TIMES
from laps_plan.plan import whole
from laps_plan.plan.whole import DEFAULT, Question, Row, Trials, best, stock, stock_as_smooth, with_answer_lengths
from laps_plan.profile import Profile
from laps_plan.sim.serving import LAPS, Serving, serve
from laps_plan.sim.streams import Tokens
from laps_plan.traffic import turns
from laps_plan.traffic.given import Traffic
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import lmsys, log_uniform, mix, uniform
from laps_plan.traffic.streams import Closed, Trace, poisson

from benchmark.results import Bar, Command, Namespace, Parser, Piece, Table, bars, count, positive
from benchmark.sim.loads import THINK_S, TOKEN_S, TURNS

KV_TOKENS = {"8b": 730_000, "30b-a3b": 640_000, "32b": 225_000}
"""Tokens of KV cache beside the weights in 88% of an H200's 141 GB."""
SHORT_S, LONG_S, TBT_S = 0.4, 4.0, 0.1
"""Objectives of goodput (seconds)."""
STREAMS, SPAN_S, PROMPT_SHARE = 32, 40.0, 0.5
"""Streams beside prompts of 8,192 tokens: their number and duration (seconds), and the prompts' share of the device."""
LENGTHS, ANSWERS = mix(lmsys(256), log_uniform(1024, 8192), 0.2), log_uniform(32, 512)
"""Chat with documents: tokens of prompts and of answers."""
CLIENTS = 192
"""Clients of the closed loop in which rates are compared."""
AGENTS_LONGEST = 16_384
"""Longest prompt of agents (tokens); longer prompts are cut."""
HEADS = (
    "", "between tokens P50", "P99", "longest", "short P90", "long P90", "mean TTFT", "requests/s", "in time",
)  # fmt: skip
TRIED = 3
"""Number of stock settings whose goodput is searched: those with the most requests in time at the given load."""
LONGER = 3
"""Factor of the requests from which goodput is searched: enough for the rates of all models."""


@dataclass
class Chats(Closed):
    """Closed loop of prompts with answers."""

    def _next(self, now: float, client: int) -> Job:
        return replace(super()._next(now, client), output=ANSWERS(self._rngs[client]))


@dataclass
class Study:
    """Study of one model."""

    model: str
    profile: Profile
    requests: int
    seed: int
    piece: Piece

    @property
    def question(self) -> Question:
        """Return the question to the planner: one server, and the objectives."""
        return Question(self.profile, 1, SHORT_S, LONG_S, TBT_S, KV_TOKENS[self.model])

    def judge(self, name: str, value: float, bar: Bar) -> None:
        """Add a figure with its bar, and print it."""
        self.piece.judge(f"{self.model}: {name}", value, bar)
        print(self.piece.figures[-1], flush=True)

    def note(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], data: Any) -> None:
        """Add a table and its raw data."""
        self.piece.tables.append(Table(f"{self.model}: {title}", heads, rows))
        self.piece.data.setdefault(self.model, {})[title] = data

    def beside_long_prompts(self) -> None:
        """Judge the time between tokens of streams while prompts of 8,192 tokens arrive."""
        step_s = self.profile.decode_s(STREAMS, 1000 * STREAMS)
        target_s = max(LEAST_TARGET_S, TIMES * step_s)
        rng = random.Random(f"{self.seed} streams")
        jobs = [Job(0.02 * i, 64, output=round(4 * SPAN_S / target_s)) for i in range(STREAMS)]
        rate = PROMPT_SHARE / self.profile.coefficients.seconds(StepShape.of([(8192, 0)]))
        jobs += [Job(2.0 + at, 8192, output=4) for at in poisson(rate, SPAN_S, rng)]
        jobs += [Job(2.0 + at, uniform(16, 256)(rng), output=4) for at in poisson(4.0, SPAN_S, rng)]
        trace = Trace(sorted(jobs, key=lambda job: job.at_s))
        found: dict[str, dict[str, float]] = {}
        for serving in (Serving(LAPS), DEFAULT, Serving("shortest-prefill-first", 512, interval=1)):
            answers = serve(serving, trace, self.profile)
            tokens = Tokens.of(answers.logs.logs, 2.0, 2.0 + SPAN_S)
            found[serving.name] = {
                name: tokens.quantile(q) for name, q in (("P50", 0.5), ("P99", 0.99), ("longest", 1.0))
            }
        rows = [[name, *(f"{1e3 * s:.1f}" for s in of.values())] for name, of in found.items()]
        self.note(
            f"time between tokens (ms) of {STREAMS} streams while prompts of 8,192 tokens come; target "
            f"{1e3 * target_s:.0f} ms", ("", "P50", "P99", "longest"), rows, {"target_s": target_s, "found": found},
        )  # fmt: skip
        laps, default = found[LAPS], found[DEFAULT.name]
        self.judge("between tokens, P99 / target", laps["P99"] / target_s, bars.COLOCATED_P99)
        self.judge("between tokens, longest / target", laps["longest"] / target_s, bars.COLOCATED_LONGEST)
        for name in ("P99", "longest"):
            self.judge(f"between tokens, {name}, laps / stock as it is", laps[name] / default[name], bars.COLOCATED_TBT)

    def chat(self, requests: int) -> Traffic:
        """Return a chat with documents at one request per second."""
        rng = random.Random(f"{self.seed} chat")
        jobs = [Job(at, LENGTHS(rng), output=ANSWERS(rng)) for at in poisson(1.0, float(requests), rng)]
        return Traffic(jobs, "chat with documents")

    def under_load(self, load: float) -> None:
        """Judge TTFT under load: LAPS over the best stock setting."""
        trials = self._trials(self.chat(self.requests), load)
        rows = [trials.row(s) for s in (Serving(LAPS), *stock())]
        laps, default = rows[0], next(r for r in rows if r.serving == DEFAULT)
        rate = trials.traffic.rate
        self._tell(f"chat with documents, {rate:.3g} requests/s, {load:.0%} of what is estimated", rows)
        short, mean, _ = bars.COLOCATED_MODELS[self.model]
        for figure, bar in (("short P90", short), ("mean TTFT", mean)):
            rival = best(stock_as_smooth(rows, laps), figure)
            name = f"{figure}, laps / {rival.serving.name} (the best of stock)"
            self.judge(name, laps.value(figure) / rival.value(figure), bar)
        over = laps.value("long P90") / default.value("long P90")
        self.judge("long P90, laps / stock as it is", over, bars.COLOCATED_LONG)
        self._goodput("chat with documents", trials, rows, self.chat(LONGER * self.requests).jobs)

    def at_saturation(self) -> None:
        """Judge requests/s of a closed loop: LAPS over the best stock setting."""
        q, rows = self.question, []
        for serving in (Serving(LAPS), q.laps_in_time(), *stock()):
            loop = Chats(LENGTHS, CLIENTS, self.requests, self.seed)
            rows.append(Row.of(serving, serve(serving, loop, self.profile), q))
        self._tell(f"closed loop of {CLIENTS} clients", rows)
        bar = bars.COLOCATED_MODELS[self.model][2]
        for own in rows[:2]:
            rival = best(stock_as_smooth(rows, own), "answers/s")
            over = own.rate / rival.rate
            against = f"{own.serving.name} / {rival.serving.name} (the best of stock)"
            self.judge(f"requests/s at saturation, {against}", over, bar)

    def agents(self, load: float) -> None:
        """Judge the goodput of coding agents."""
        rng = random.Random(f"{self.seed} agents")
        sessions = turns.agents(AGENTS_LONGEST, THINK_S, TOKEN_S)
        jobs = turns.jobs(turns.stretches(sessions, TURNS, 1.0, float(self.requests), rng), float(self.requests))
        # The turns have answer lengths, so none is drawn.
        trials = self._trials(with_answer_lengths(Traffic(jobs, "agents"), lambda _: (1, 1), self.seed), load)
        rows = [trials.row(s) for s in (Serving(LAPS), *stock())]
        self._tell(f"agents, {trials.traffic.rate:.3g} requests/s, {load:.0%} of what is estimated", rows)
        self._goodput("agents", trials, rows)

    def _goodput(self, what: str, trials: Trials, rows: Sequence[Row], jobs: Sequence[Job] | None = None) -> None:
        q = self.question
        tried = [q.laps(), q.laps_in_time(), *(r.serving for r in whole.best_first(rows)[:TRIED])]
        found = {s.name: trials.find_highest_rate(s, q, 1, jobs) for s in tried}
        cells = [[name, f"{rate:.3g}"] for name, rate in found.items()]
        self.note(f"{what}: requests/s with 90% in time", ("", "requests/s"), cells, found)
        own = {name: rate for name, rate in found.items() if name.startswith(LAPS)}
        others = {name: rate for name, rate in found.items() if name not in own}
        rival = max(others, key=lambda name: others[name])
        over = max(own.values()) / others[rival] if others[rival] else float("inf")
        self.judge(f"goodput, {what}, laps / {rival} (the best of stock)", over, bars.COLOCATED_GOODPUT)

    def _trials(self, traffic: Traffic, load: float) -> Trials:
        rough = Trials(self.question, traffic)
        return Trials(self.question, traffic.at_rate(load * rough.capacity), search=self.requests // 2)

    def _tell(self, title: str, rows: Sequence[Row]) -> None:
        cells = []
        for r in rows:
            times = (*r.tbt.values(), r.value("short P90"), r.value("long P90"), r.mean)
            cells.append([r.serving.name, *(f"{1e3 * s:.0f}" for s in times), f"{r.rate:.2f}", f"{r.in_time:.1%}"])
        data = [{**asdict(r), "parts": None, "setup": r.serving.name} for r in rows]
        self.note(f"{title} (ms)", HEADS, cells, data)


def options(p: Parser) -> None:
    p.add_argument("--models", nargs="+", choices=list(KV_TOKENS), default=list(KV_TOKENS))
    p.add_argument("--requests", type=count, default=1500, help="requests of a simulation (1500)")
    p.add_argument("--load", type=positive, default=0.7, help="share of what is estimated to be the most (0.7)")


def run(args: Namespace) -> Piece:
    text = (
        "Simulated servers that prefill and decode, a device each: H200, profiles from kernels that NVIDIA measured. "
        "Chat with documents: prompts of LMSYS lengths up to 256 tokens, 20% of 1,024 to 8,192, answers of 32 to 512. "
        f"The best of stock is, in each figure, the best of {len(stock())} settings whose P99 between tokens is no "
        f"longer than that of LAPS. In time: first token within {1e3 * SHORT_S:g} ms (short) or {1e3 * LONG_S:g} ms "
        f"(long), 99 of 100 others within {1e3 * TBT_S:g} ms after the one before. Retraction and transfers are not "
        "simulated."
    )
    piece = Piece("sim-colocated", "Servers that prefill and decode, simulated", text, args.seed)
    for model in args.models:
        study = Study(model, Profile.load(f"h200-qwen3-{model}"), args.requests, args.seed, piece)
        study.beside_long_prompts()
        study.under_load(args.load)
        study.at_saturation()
        study.agents(args.load)
    return piece


COMMAND = Command("benchmark.sim.colocated", __doc__, run, options, out="sim-colocated", seed=0)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
