"""``laps-top``: queues, times to first token and the slowest requests of many servers, live in a terminal.

    laps-top http://prefill-0:30000 http://prefill-1:30000 http://router:8000
    laps-top --once --json http://prefill-0:30000 | jq .servers

A prefill server needs --enable-laps-scheduler, a router --enable-laps-alloc. Press q or Ctrl-C to end.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from laps_top import keys
from laps_top.ask import Server
from laps_top.rows import Table, table

KEY = "LAPS_API_KEY"
"""The environment variable that holds a server's or router's key."""
AT_ONCE = 64
"""Servers that are asked at the same time."""
WIDTH = 180
"""Width of the output without a terminal (columns)."""


def positive(text: str) -> float:
    """Return a finite number above 0. Raises ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number > 0")
    return value


def natural(text: str) -> int:
    """Return a number from 0 on. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return int(text)


def parser() -> argparse.ArgumentParser:
    assert __doc__
    what, _, examples = __doc__.partition("\n\n")
    made = argparse.ArgumentParser(
        "laps-top", description=what, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("urls", nargs="+", metavar="URL", help="a prefill server or a router")
    made.add_argument("--once", action="store_true", help="print one table and end; exit code 1 if a server is silent")
    made.add_argument("--json", action="store_true", help="print a line of JSON each time instead of a table")
    made.add_argument("--slowest", type=natural, default=10, metavar="N", help="slowest requests that are shown (10)")
    made.add_argument("--interval", type=positive, default=1.0, metavar="S", help="seconds between two updates (1)")
    made.add_argument("--timeout", type=positive, default=3.0, metavar="S", help="seconds for an answer (3)")
    made.add_argument("--api-key", metavar="KEY", help=f"key of the servers; better in the environment: {KEY}")
    return made


def look(servers: Sequence[Server], pool: ThreadPoolExecutor, slowest: int) -> Table:
    """Ask all servers at once. Return the table of their answers."""
    answers = pool.map(Server.ask, servers)
    return table({s.url: a for s, a in zip(servers, answers, strict=True)}, slowest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 2 if the input cannot be used; 1 with --once if a server does not answer."""
    made = parser()
    args = made.parse_args(argv)
    key = args.api_key or os.environ.get(KEY)
    try:
        servers = list({s.url: s for s in (Server(url, key, args.timeout) for url in args.urls)}.values())
    except ValueError as e:
        made.error(str(e))
    with ThreadPoolExecutor(min(AT_ONCE, len(servers))) as pool:
        try:
            if args.json:
                return _print_json(args, servers, pool)
            return _show(args, servers, pool)
        except KeyboardInterrupt:
            return 0
        except BrokenPipeError:
            # The reader has closed the pipe; without this, flushing stdout at exit would fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _print_json(args: argparse.Namespace, servers: Sequence[Server], pool: ThreadPoolExecutor) -> int:
    while True:
        shown = look(servers, pool, args.slowest)
        print(msgspec.json.encode(shown).decode(), flush=True)
        if args.once:
            return _silent(shown)
        time.sleep(args.interval)


def _show(args: argparse.Namespace, servers: Sequence[Server], pool: ThreadPoolExecutor) -> int:
    try:
        from rich.console import Console
        from rich.live import Live

        from laps_top.draw import draw
    except ImportError:
        print("laps-top: tables need the package rich (pip install rich); --json does not", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    if args.once or not console.is_terminal:
        shown = look(servers, pool, args.slowest)
        console.print(draw(shown))
        return _silent(shown)
    with keys.pressed() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(draw(look(servers, pool, args.slowest)), refresh=True)
            if key(args.interval) in keys.ENDS:
                return 0


def _silent(shown: Table) -> int:
    return int(any(not row.kind for row in shown.servers))
