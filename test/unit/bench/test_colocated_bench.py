"""Comparison of servers that prefill and decode: the rivals of LAPS, and the reported figures."""

from __future__ import annotations

from benchmark.colocated import DEFAULT, LAPS, NAMES, VARIANTS, piece, stock_as_smooth
from benchmark.results.comparison import Comparison

SETTINGS = {"streams": 8, "longs": 3, "shorts": 12, "seconds": 12.0, "tbt_ms": None, "device": "here"}


def rounds(**of: float) -> list[dict[str, float]]:
    return [{**dict.fromkeys(NAMES, 1.0), **of}] * 3


def test_rivals_are_stock_settings_with_no_longer_token_gaps() -> None:
    a, b, c = (name for name in VARIANTS if name not in (LAPS, DEFAULT))
    seen = Comparison(
        {
            LAPS: rounds(tbt_p99=0.05, short_p90=0.1),
            DEFAULT: rounds(tbt_p99=1.0, short_p90=0.01),
            a: rounds(tbt_p99=0.04, short_p90=0.4),
            b: rounds(tbt_p99=0.05, short_p90=0.2),
            c: rounds(tbt_p99=0.06, short_p90=0.1),
        }
    )
    assert stock_as_smooth(seen) == [a, b]
    found = {f.name: f for f in piece(seen, {"target_ms": 50.0}, 1, SETTINGS).figures}
    best = found[f"short P90, laps / {b} (the best of stock)"]
    assert (best.value, best.met) == (0.5, True)
    assert found[f"between tokens, P99, laps / {DEFAULT}"].value == 0.05
    assert found["between tokens, P99, laps / target"].met
    assert not found["between tokens, longest, laps / target"].met


def test_smoothest_stock_setting_is_rival_if_none_matches() -> None:
    names = [name for name in VARIANTS if name != LAPS]
    stock = {name: rounds(tbt_p99=0.1 + i) for i, name in enumerate(names)}
    seen = Comparison({LAPS: rounds(tbt_p99=0.01), **stock})
    assert stock_as_smooth(seen) == names[:1]
