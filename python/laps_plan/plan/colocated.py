"""``laps-plan --colocated``: LAPS on servers that prefill and decode, compared with SGLang's settings for such servers,
and with the same number of devices split into prefill and decode servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laps_plan.plan.advice import GAIN, HARM, IN_TIME_GAIN, LONG_HARM
from laps_plan.plan.figures import COMPARED, Change
from laps_plan.plan.setup import IN_TIME
from laps_plan.plan.whole import FIGURES, MORE, Question, Row, Trials, best, best_first, splits, stock, stock_as_smooth
from laps_plan.sim.serving import LAPS, Serving
from laps_plan.table import Table
from laps_plan.traffic.job import LONG, SHORT, Job

SAME = 0.03
"""Relative difference below which two rates count as equal; the search for a rate is no more precise."""
TRIED = 2
"""Number of stock settings whose highest rate is searched."""


@dataclass
class Against:
    """Highest rates (requests per second) of the same number of devices, colocated and disaggregated."""

    what: str
    """Difference from the question, in words; empty if none."""
    laps: float
    apart: float
    """Rate of prefill servers under LAPS, and decode servers."""
    split: int
    """Number of prefill servers in the best split."""

    @property
    def word(self) -> str:
        """Return the rating of colocated servers, to be followed by "prefill and decode servers"."""
        return (
            "better than" if self.ratio > 1.0 + SAME else "not better than" if self.ratio < 1.0 - SAME else "as good as"
        )

    @property
    def ratio(self) -> float:
        """Return the colocated over the disaggregated rate; infinite if only the latter is 0, and 1 if both are 0."""
        return self.laps / self.apart if self.apart else float("inf") if self.laps else 1.0


@dataclass
class Answer:
    """Results of all simulations for a question."""

    trials: Trials
    rows: list[Row]
    laps: Row
    """LAPS with its defaults."""
    changes: dict[str, tuple[Row, Change]]
    """By figure: the best stock setting of ``stock_as_smooth``, and the figures of LAPS relative to that setting."""
    devices: int
    """Number of devices in the comparison with disaggregation."""
    rates: dict[str, tuple[Serving, float]]
    """Best setting and its highest rate: of LAPS, of stock, and of stock with separate prefill and decode servers."""
    cases: list[Against]
    """Comparisons for the question, then for variations of the question."""

    @property
    def recommended(self) -> bool:
        """Return True if LAPS is better than stock according to RULE."""
        found = [self.changes[f][1].ratios.get(f) for f in (f"{SHORT} P90", "mean TTFT")]
        known = [ratio for ratio in found if ratio is not None]
        gains = any(ratio.high < GAIN for ratio in known) and all(ratio.low <= HARM for ratio in known)
        long = self.changes[f"{LONG} P90"][1].ratios.get(f"{LONG} P90")
        kept = self.laps.in_time >= self.changes["in time"][0].in_time - IN_TIME_GAIN
        rates = self.rates["laps"][1] >= (1.0 - SAME) * self.rates["stock"][1]
        return gains and (long is None or long.middle <= LONG_HARM) and kept and rates


RULE = (
    "LAPS is recommended where, against the best of stock in each figure, the P90 of short requests or the mean TTFT "
    f"is at least {1 - GAIN:.0%} lower beyond chance and neither more than {HARM - 1:.0%} higher, the P90 of long "
    f"requests at most {LONG_HARM:g} times as high, the share in time not more than {IN_TIME_GAIN:.0%} lower, and as "
    f"many requests can be served in time, to {SAME:.0%}."
)


def answer(trials: Trials) -> Answer:
    q = trials.question
    laps = trials.row(Serving(LAPS))
    rows = [laps, trials.row(q.laps()), trials.row(q.laps_in_time()), *(trials.row(s) for s in stock())]
    others = stock_as_smooth(rows, laps)
    changes = {}
    for figure in FIGURES:
        rival = best(others, figure)
        changes[figure] = rival, Change.of(laps.parts, rival.parts)
    devices = max(2, q.servers)
    jobs = trials.traffic.jobs
    apart = [Serving("fcfs", prefill=n) for n in splits(trials, jobs, devices)]
    own = _find_best_setting(trials, [q.laps(), q.laps_in_time()], devices)
    rates = {
        "laps": own,
        "stock": _find_best_setting(trials, [r.serving for r in best_first(rows)[:TRIED]], devices),
        "apart": _find_best_setting(trials, apart, devices),
    }
    own_way = Question.laps if own[0] == q.laps() else Question.laps_in_time
    return Answer(trials, rows, laps, changes, devices, rates, _cases(trials, own_way, own[1], devices))


def _find_best_setting(trials: Trials, servings: Sequence[Serving], devices: int) -> tuple[Serving, float]:
    """Return the setting with the highest rate, and this rate."""
    found = [(s, trials.find_highest_rate(s, trials.question, devices)) for s in servings]
    return max(found, key=lambda one: one[1])


def _cases(trials: Trials, own_way: Callable[[Question], Serving], asked: float, devices: int) -> list[Against]:
    q, jobs = trials.question, trials.traffic.jobs

    def case(what: str, q: Question, jobs: Sequence[Job], laps: float | None = None) -> Against:
        apart = {
            n: trials.find_highest_rate(Serving(LAPS, prefill=n), q, devices, jobs)
            for n in splits(trials, jobs, devices)
        }
        split = max(apart, key=lambda n: apart[n])
        own = trials.find_highest_rate(own_way(q), q, devices, jobs) if laps is None else laps
        return Against(what, own, apart[split], split)

    def longer(factor: float) -> list[Job]:
        return [replace(job, output=max(1, round(factor * job.output))) for job in jobs]

    half = replace(q, tbt_s=q.tbt_s / 2)
    return [
        case("", q, jobs, asked),
        case("with answers a quarter as long", q, longer(0.25)),
        case("with answers four times as long", q, longer(4.0)),
        case(f"with at most {1e3 * half.tbt_s:g} ms between tokens", half, jobs),
    ]


# -- in words


def traffic(a: Answer) -> list[str]:
    """Return the traffic and the question, one sentence each."""
    jobs, q = a.trials.traffic.jobs, a.trials.question
    mean = {name: sum(getattr(j, name) for j in jobs) / len(jobs) for name in ("new", "cached", "output")}
    servers = "1 server" if q.servers == 1 else f"{q.servers} servers"
    return [
        f"{len(jobs):,} requests, {a.trials.traffic.what}, at {a.trials.traffic.rate:.3g} per second: "
        f"{sum(j.kind == SHORT for j in jobs) / len(jobs):.1%} short (up to 256 new tokens), {mean['new']:.0f} new and "
        f"{mean['cached']:.0f} cached tokens and answers of {mean['output']:.0f} tokens on average.",
        *a.trials.traffic.notes,
        f"{servers.capitalize()} of {q.profile.name} ({q.profile.source}), each of which prefills and decodes; the "
        f"load is about {a.trials.load:.2f}.",
        f"In time: first token within {1e3 * q.short_s:g} ms (short), {1e3 * q.long_s:g} ms (long), and 99 of 100 "
        f"others within {1e3 * q.tbt_s:g} ms after the one before.",
    ]


def side_by_side(a: Answer) -> Table:
    """Return the table of all settings; stock settings by the share in time, then by mean TTFT."""
    heads = ["", "between tokens P50", "P99", "longest", "short P50", "P90", "P99", "long P50", "P90", "P99", "mean",
             "answers/s", "in time"]  # fmt: skip
    own = [r for r in a.rows if r.serving.policy == LAPS]
    return Table(
        "Side by side",
        heads,
        [_row(r) for r in (*own, *best_first(a.rows))],
        "Times in ms; those of short and long requests are to the first token. interval: --prefill-decode-interval; "
        "mixed: --enable-mixed-chunk; the number is --chunked-prefill-size.",
    )


def _row(r: Row) -> list[str]:
    times = [r.tbt["p50"], r.tbt["p99"], r.tbt["longest"]]
    first = [of.get(q) for of in (r.short, r.long) for q in ("p50", "p90", "p99")]
    shown = ["-" if t is None else f"{1e3 * t:.0f}" for t in (*times, *first, r.mean)]
    return [r.serving.name, *shown, f"{r.rate:.2f}", f"{r.in_time:.1%}"]


def hindsight(a: Answer) -> Table:
    """Return the table of LAPS against the best stock setting in each figure."""
    rows = []
    for figure, (rival, change) in a.changes.items():
        interval = str(change.ratios[figure]) if figure in COMPARED and figure in change.ratios else ""
        ratio = a.laps.value(figure) / rival.value(figure) if rival.value(figure) > 0.0 else None
        rows.append([figure, rival.serving.name, "-" if ratio is None else f"{ratio:.2f}", interval])
    note = (
        "The best of stock in hindsight, in each figure another: of the settings whose P99 between tokens is no longer "
        f"than that of LAPS. Below 1 LAPS is faster; of {' and '.join(MORE)} above 1 is better. In brackets the 95% "
        "interval over parts of the traffic."
    )
    return Table("LAPS over the best of stock", ["", "best of stock", "ratio", "mean of parts"], rows, note)


def hardware(a: Answer) -> Table:
    """Return the table of the highest rates of the same number of devices."""
    rows = []
    for case in a.cases:
        apart = f"{case.split} + {a.devices - case.split}"
        rows.append([case.what or "as asked", f"{case.laps:.3g}", f"{case.apart:.3g}", apart, f"{case.ratio:.2f}"])
    note = (
        f"Requests per second at which {IN_TIME:.0%} of each class are in time and no server's streams need more than "
        f"{a.trials.question.kv_tokens:,} tokens of KV cache, to about {SAME:.0%}. Colocated servers under LAPS have "
        f"{a.rates['laps'][0].flags()}, with --laps-tbt-ms always a fifth below the objective. A transfer from a "
        "prefill to a decode server takes no time here."
    )
    heads = ["", "colocated, LAPS", "prefill + decode, LAPS", "split", "ratio"]
    return Table(f"{a.devices} devices: what can be served in time", heads, rows, note)


def verdict(a: Answer) -> list[str]:
    """Return sentences that say what to run and what to buy."""
    ratios = ", ".join(
        f"{figure} x {a.laps.value(figure) / a.changes[figure][0].value(figure):.2f}"
        for figure in (f"{SHORT} P90", f"{LONG} P90", "mean TTFT", "answers/s")
        if a.changes[figure][0].value(figure) == a.changes[figure][0].value(figure)
    )
    own, most, apart = (a.rates[kind] for kind in ("laps", "stock", "apart"))
    served = (
        f"{a.devices} colocated devices can be given {own[1]:.3g} requests per second with LAPS ({own[0].name}) and "
        f"{most[1]:.3g} without it ({most[0].name}); {_split(apart[0].prefill, a.devices)} without it {apart[1]:.3g}."
    )
    told = f"{ratios}, each against the best stock setting whose streams wait no longer"
    return [
        f"LAPS is recommended: {told}."
        if a.recommended
        else f"At this rate LAPS is not shown to be better than stock {most[0].name}: not recommended. LAPS: {told}.",
        f"Start each server with: {(Serving(LAPS) if a.recommended else most[0]).flags()}",
        _question(a),
        served,
    ]


def _question(a: Answer) -> str:
    """Return sentences that say when colocated servers with LAPS are better than prefill and decode servers."""
    asked, *others = a.cases
    count = "Two" if a.devices == 2 else str(a.devices)
    said = (
        f"{count} colocated servers with LAPS are {asked.word} {_split(asked.split, a.devices)} for this: "
        f"{asked.laps:.3g} requests per second in time against {asked.apart:.3g} (x {asked.ratio:.2f})."
    )
    able = [case for case in others if case.laps or case.apart]
    for word in dict.fromkeys(case.word for case in able):
        which = " and ".join(f"{case.what} (x {case.ratio:.2f})" for case in able if case.word == word)
        said += f" They are {word} prefill and decode servers {which}."
    unable = " and ".join(case.what for case in others if case not in able)
    said += f" Neither can serve it in time {unable}." if unable else ""
    return said


def _split(prefill: int, devices: int) -> str:
    decode = devices - prefill
    return f"{prefill} prefill and {decode} decode server{'s' if decode > 1 else ''}"


def text(a: Answer) -> str:
    tables = [side_by_side(a), hindsight(a), hardware(a)]
    return "\n\n".join(["\n".join(traffic(a)), *map(str, tables), RULE, "\n".join(verdict(a))]) + "\n"


def as_dict(a: Answer) -> dict[str, Any]:
    """Return the answer for programs (JSON-ready). Times in seconds."""
    q = a.trials.question

    def row(r: Row) -> dict[str, Any]:
        return {
            "setup": r.serving.name, "flags": r.serving.flags(), "tbt_s": r.tbt, "short_s": r.short, "long_s": r.long,
            "mean_s": r.mean, "answers_per_s": r.rate, "in_time": r.in_time,
        }  # fmt: skip

    return {
        "recommended": {"laps": a.recommended},
        "traffic": {
            "what": a.trials.traffic.what, "requests": len(a.trials.traffic.jobs),
            "rate_per_s": a.trials.traffic.rate, "load": a.trials.load,
        },
        "question": {
            "profile": q.profile.name, "source": q.profile.source, "servers": q.servers,
            "ttft_s": [q.short_s, q.long_s], "tbt_s": q.tbt_s,
        },
        "side_by_side": [row(r) for r in a.rows],
        "best_of_stock": {
            figure: {
                "setup": rival.serving.name,
                "ratio": a.laps.value(figure) / rival.value(figure),
                **change.as_dict(),
            }
            for figure, (rival, change) in a.changes.items()
            if rival.value(figure) > 0.0
        },
        "highest_rates": {
            "devices": a.devices,
            **{kind: {"setup": s.name, "prefill": s.prefill, "per_s": rate} for kind, (s, rate) in a.rates.items()},
            "cases": [
                {"what": c.what, "laps_per_s": c.laps, "apart_per_s": c.apart, "prefill": c.split} for c in a.cases
            ],
        },
        "verdict": verdict(a),
    }  # fmt: skip
