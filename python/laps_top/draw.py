"""Terminal tables of the collected rows."""

from __future__ import annotations

from laps_core.length import CLASSES
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from laps_top.rows import Quantiles, Row, Table

NONE = "-"
WORDS = {"server", "kind", "state", "class", "request", "mostly", "longest behind"}
"""Columns that hold words; all others hold numbers."""
STYLES = {"short": "cyan", "long": "yellow"}


def plain(said: str, style: str = "") -> Text:
    """Return the text of a server without markup and control characters."""
    return Text("".join(c if c.isprintable() else "?" for c in said), style=style)


def number(value: float | None, unit: float = 1.0, suffix: str = "") -> str:
    """Return `value` times `unit`, rounded to an integer from 10 on, else with one decimal unless it is an integer."""
    if value is None:
        return NONE
    value *= unit
    return f"{value:,.0f}{suffix}" if abs(value) >= 10 or value == int(value) else f"{value:.1f}{suffix}"


def draw(shown: Table) -> RenderableType:
    """Return the tables of the servers and of the slowest requests."""
    servers = _grid(
        *("server", "kind", "waiting", "oldest", "busy", "short P50 / P90", "long P50 / P90", "preempted", "model err"),
        *("KV tokens", "state"),
    )
    for row in shown.servers:
        servers.add_row(plain(row.url), *_cells(row), plain(row.error, "bold red") if row.error else Text("ok"))
    slow = _grid("TTFT", "class", "request", "server", "mostly", "longest behind")
    for s in shown.slowest:
        cells = (plain(text) for text in (s.rid, s.url, s.mostly, s.behind))
        slow.add_row(number(s.ttft_ms, 1.0, " ms"), plain(s.cls, STYLES.get(s.cls, "")), *cells)
    return Group(servers, Text("\nSlowest requests of the last 30 s", "bold"), slow) if shown.slowest else servers


def _grid(*names: str) -> Grid:
    made = Grid(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for name in names:
        made.add_column(name, justify="left" if name in WORDS else "right", overflow="fold")
    return made


def _cells(row: Row) -> tuple[str, ...]:
    waiting = " / ".join(number(row.waiting.get(c)) for c in CLASSES)
    return (
        row.kind,
        number(row.waiting["all"]) if "all" in row.waiting else waiting,
        number(row.oldest_wait_s, 1e3, " ms"),
        number(row.busy_share, 100.0, "%"),
        *(_both(row.ttft_ms.get(c, Quantiles())) for c in CLASSES),
        number(row.preemptions),
        number(row.model_error, 100.0, "%"),
        number(row.kv_tokens),
    )


def _both(ttft: Quantiles) -> str:
    return NONE if ttft.p50 is None else f"{number(ttft.p50)} / {number(ttft.p90, 1.0, ' ms')}"
