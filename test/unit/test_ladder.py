"""Figures of the ladder of row counts."""

from __future__ import annotations

from benchmark import ladder

CUT = {
    "layers": 1, "pauses": 2, "ms": 1.0, "long_error": 0.0, "same_token": True, "short_error": 0.02,
    "same_short_tokens": True,
}  # fmt: skip
DATA = {
    "7B": {
        "breakable": {
            "times": [
                {"rows": 64, "requests": 4, "breakable": 6.0, "eager": 16.0},
                {"rows": 8, "requests": 1, "eager": 15.0},
            ],
            "sliced": [CUT],
        },
        "full": {"times": [{"rows": 64, "requests": 4, "full": 4.0}]},
    }
}


def test_one_line_for_each_batch_with_what_each_path_took() -> None:
    times, cuts = ladder.tables(DATA)
    assert times.rows == [("8", "1", "15.00", "-", "-", "-"), ("64", "4", "16.00", "6.00", "4.00", "1.50")]
    assert cuts.rows == [("1", "2", "0", "True", "0.02", "True")]


def test_slices_that_change_what_is_computed_are_seen() -> None:
    assert [f.met for f in ladder.figures(DATA)] == [False]
    assert ladder.figures({"7B": {"full": {}}}) == []
