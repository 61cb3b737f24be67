"""Pieces from results that are not pieces themselves: ``benchmark.window`` and ``benchmark.router``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.rig.piece import Figure, Piece, Table

STOCK, LAPS = "stock", "laps"
ORIGIN = "origin.json"
"""Beside the result: where it comes from (``rig.machine.origin``)."""


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _origin(folder: Path) -> dict[str, Any]:
    """As arguments of a piece. What is rendered here need not have been measured here."""
    return _read(folder / ORIGIN) or {"machine": {}, "versions": {}, "commit": ""}


def _of_dict(name: str, r: dict[str, Any], bar: str = "", met: bool | None = None) -> Figure:
    return Figure(name, r["median"], bar, met, r["low"], r["high"], r["rounds"], r["verdict"])


def window(folder: Path) -> Piece | None:
    """The waiting window, deadlines and the latency model."""
    result = _read(folder / "result.json")
    if result is None:
        return None
    tables, figures = [], []
    if alone := result.get("alone"):
        figures.append(_of_dict("lone TTFT, AWD / dual queue", alone["ratio"], "<= 1.03", alone["met"]))
    if closed := result.get("closed"):
        rows = []
        for clients, point in closed["points"].items():
            cells = []
            for name, r in point["ratio"].items():
                cells.append(f"{r['median']:.3f} [{r['low']:.3f}, {r['high']:.3f}] {r['verdict']}")
                figures.append(_of_dict(f"requests/s, {clients} clients, {name} / dual queue", r))
            rate = {n: statistics.median(v) for n, v in point["requests_per_s"].items()}
            rows.append((clients, *(f"{v:.0f}" for v in rate.values()), *cells))
        first = next(iter(closed["points"].values()))
        heads = (
            "clients",
            *(f"{n} /s" for n in first["requests_per_s"]),
            *(f"{n} / dual queue" for n in first["ratio"]),
        )
        tables.append(Table("Closed loop of short prompts: requests/s", heads, rows))
        figures += [
            Figure("requests/s at AWD's worst point", closed["worst"], ">= 0.98", closed["worst"] >= 0.98),
            Figure("requests/s at AWD's best point", closed["best"], ">= 1.05", closed["best"] >= 1.05),
        ]
    if slo := result.get("slo"):
        rows = [
            (
                name,
                *(f"{100 * statistics.median(slo['violations'][k][name]):.1f}%" for k in slo["violations"]),
                *(f"{statistics.median(slo['ttft_p90_ms'][k][name]):.0f}" for k in slo["ttft_p90_ms"]),
            )
            for name in slo["violations"]["short"]
        ]
        heads = ("", *(f"{k} in violation" for k in slo["violations"]), *(f"{k} P90 ms" for k in slo["ttft_p90_ms"]))
        note = ", ".join(f"SLO of {k} requests {v:.0f} ms" for k, v in slo["slo_ms"].items())
        tables.append(Table(f"Mixed open load, {slo['rate_per_s']:.1f} requests/s: SLO violations", heads, rows, note))
        name = f"short requests in violation, LAPS / {slo['best_stock']}, the best of stock"
        figures.append(_of_dict(name, slo["ratio"], "<= 0.5", slo["met"]))
    for load, status in result.get("model", {}).items():
        if error := status.get("error"):
            for key, bar in (("median", 0.10), ("p90", 0.25)):
                label = f"step time, {key} relative error, {load}"
                figures.append(Figure(label, error[key], f"<= {bar:g}", error[key] <= bar))
    run = result["run"]
    return Piece(
        name="window",
        title="The waiting window, deadlines and the latency model",
        text="Servers with the dual queue alone, with AWD and with a fixed window, in turns; then deadlines in a mixed "
        f"open load. {run['rounds']} rounds.",
        seed=4,
        tables=tables,
        figures=figures,
        pictures={"window.png": "Requests/s over the dual queue alone; SLO violations."},
        data=result,
        command=f"python -m benchmark.window --rounds {run['rounds']}",
        **_origin(folder),
    )


def router(mode: str) -> Callable[[Path], Piece | None]:
    """The router against stock MiniLB in one of its modes."""
    make = {"echo": _echo, "mix": _mix, "real": _real}[mode]

    def adapt(folder: Path) -> Piece | None:
        result = _read(folder / f"router-{mode}.json")
        return None if result is None else replace(make(result), **_origin(folder))

    return adapt


def _echo(result: Any) -> Piece:
    rows, figures = [], []
    for at in result["loads"]:
        kind = "stream" if at["stream"] else "whole"
        rate, p99 = at["requests_per_s"], at["p99_ms"]
        rows.append((
            f"{kind}, {at['clients']}", *(f"{rate[n]:.0f}" for n in (STOCK, LAPS)),
            *(f"{p99[n]:.1f}" for n in (STOCK, LAPS)), *(f"{at['cpu_ms'][n]:.2f}" for n in (STOCK, LAPS)),
        ))  # fmt: skip
        load, times, later = f"{kind}, {at['clients']} clients, laps / stock", at["times_stock"], p99[LAPS] / p99[STOCK]
        figures += [
            Figure(f"router: requests/s, {load}", times, ">= 2", times >= 2.0),
            Figure(f"router: P99 latency, {load}", later, "<= 1", later <= 1.0),
        ]
    heads = ("reply, clients", "stock /s", "laps /s", "stock P99 ms", "laps P99 ms", "stock CPU ms", "laps CPU ms")
    note = "CPU: of the router's process, a request."
    return Piece(
        name="router-echo",
        title="What the router costs",
        text="Stock MiniLB and the LAPS router in front of the same instant back ends, in turns; "
        f"medians over {result['rounds']} rounds.",
        seed=0,
        tables=[Table("Both routers in front of instant back ends", heads, rows, note)],
        figures=figures,
        data={"result": result},
        command="python -m benchmark.router --echo",
    )


def _mix(result: Any) -> Piece:
    rows = [
        (
            str(run["prefill"]), f"{change['short_share']:.0%}", " + ".join(map(str, change["split"])),
            ", ".join(f"{at:.1f} s to {to}" for at, to in change["moves"]) or "none",
            *(f"{v:.0f}" for v in change["ttft_p90_ms"].values()), str(change["failed"]),
        )
        for run in result
        for change in run["changes"]
    ]  # fmt: skip
    figures = []
    for run in result:
        # What comes before the first change is the controller finding its start.
        changes, most = run["changes"][1:], run["prefill"] // 2 + 1
        first = max((c["moves"] or [[run["phase_s"]]])[0][0] for c in changes) / run["period_s"]
        moves = max(len(c["moves"]) for c in changes)
        of = f"after a change, {run['prefill']} instances"
        figures += [
            Figure(f"control periods to the first move {of}", first, "<= 3", first <= 3.0),
            Figure(f"moves {of}", moves, f"<= {most}", moves <= most),
        ]
    heads = ("instances", "short share", "short + long", "moves", "short P90 ms", "long P90 ms", "failed")
    return Piece(
        name="router-mix",
        title="How the pools follow a mix that changes",
        text="The share of short requests changes from phase to phase; emulated prefill instances behind the router. "
        f"A control period is {result[0]['period_s']:g} s.",
        seed=0,
        tables=[Table("Pools after each change", heads, rows)],
        figures=figures,
        data={"result": result},
        command="python -m benchmark.router --mix",
    )


def _real(result: Any) -> Piece:
    rows = []
    for name, rounds in result["rounds"].items():
        cells = [
            f"{statistics.median(r[k][q] for r in rounds):.0f}" for k in ("short", "long") for q in ("p50_ms", "p90_ms")
        ]
        rows.append((name, *cells, str(sum(r["failed"] for r in rounds))))
    value = result["short_p90_of_stock"]
    return Piece(
        name="router-real",
        title="Short chats among long prompts behind the router",
        text=f"{result['prefill']} real prefill servers and a decode server; the same arrivals behind both routers, in "
        "turns. Medians over rounds.",
        seed=0,
        tables=[
            Table("TTFT (ms)", ("router", "short P50", "short P90", "long P50", "long P90", "failed"), rows)
        ],
        figures=[
            Figure(
                "short P90 TTFT behind the router, laps / stock", value, "<= 0.5", value <= 0.5,
                rounds=len(result["rounds"][LAPS]),
            )
        ],
        data={"result": result},
        command="python -m benchmark.router --real",
    )  # fmt: skip
