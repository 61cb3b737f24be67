"""Verdicts on the paper's claims, from runs with known figures."""

from __future__ import annotations

from typing import Any

from benchmark.fidelity import claims


def runs(rate: float, mean: float, over: float) -> dict[str, Any]:
    open_ = {"short_p90": 0.1, "long_p90": 1.0, "mean": mean, "over": over, "rate": rate}
    return {
        "open": {"0.5": open_, "0.85": open_},
        "closed": {"8": {"rate": rate, "mean": mean, "over": over, "fixed": 0.2}},
    }


def verdicts(mine: dict[str, Any], servers: int, model: str = "8b") -> dict[str, str]:
    theirs = runs(10.0, 1.0, 0.4)
    found = {"stock": theirs, "stock, gateway": runs(10.0, 1.0, 0.047), "laps servers": mine, "laps": mine}
    return {row[0].split(" (")[0]: row[3] for row in claims.rows(found, found, model, servers)}


def test_reached_claims_are_reported_as_reached() -> None:
    found = verdicts(runs(14.0, 0.6, 0.0), 1)
    assert set(found.values()) == {"reached"}
    assert len(found) == 4


def test_unchanged_figures_reach_no_claim() -> None:
    assert set(verdicts(runs(10.0, 1.0, 0.4), 1).values()) == {"not reached"}
    assert set(verdicts(runs(10.0, 1.0, 0.4), 4).values()) == {"not reached"}


def test_each_claim_has_separate_bar() -> None:
    found = verdicts(runs(11.0, 0.75, 0.0), 4)
    assert found["prefill latency -30% and more"] == "not reached"
    assert found["average latency -20% at the same requests/s"] == "reached"
    assert found["+33% requests/s with 8 instances"] == "not reached"
    assert found["violations of the SLO 28 points below plain data parallel"] == "reached"
    assert found["violations of the SLO 12 points below the SGLang router"] == "not reached"
    assert found["0% of requests over the SLO against 4.7% of the SGLang router"] == "reached"
    assert found["deadline-free work on 4 instances: 8% less time"] == "reached"
    assert "+35% requests/s for 32B" in verdicts(runs(13.0, 0.6, 0.0), 1, "32b")
