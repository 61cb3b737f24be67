"""Printed table of the ladder of row counts."""

from __future__ import annotations

from benchmark.gpu import ladder


def test_table_lists_times_of_each_path_per_row_count() -> None:
    times = [
        {"rows": 64, "requests": 4, "breakable": 6.0, "eager": 16.0},
        {"rows": 8, "requests": 1, "eager": 15.0},
        {"rows": 64, "requests": 4, "full": 4.0},
    ]
    assert ladder.table("7B", times).rows == [
        ("8", "1", "15.00", "-", "-", "-"), ("64", "4", "16.00", "6.00", "4.00", "1.50")
    ]  # fmt: skip
