"""Command line of every benchmark: shared options, errors in one line, and the piece that is written at the end.

To add a benchmark, write ``options(p)`` and ``run(args)``, which returns a ``Piece``, in a module of ``benchmark``.
Pass both to a ``Command``. To add the benchmark to the report, name its command in ``steps.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from benchmark.results.piece import Piece, command_text
from benchmark.rig import REPO, Progress, ServerError


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors in one line and does not reformat descriptions."""

    def __init__(self, program: str, doc: str | None) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=command_text(program, []), description=doc, formatter_class=raw)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> float:
    """Return the number > 0 in ``text``."""
    if not float(text) > 0.0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return float(text)


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number >= ``least``."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not {'positive' if least == 1 else f'at least {least}'}")
        return int(text)

    return integer


count = at_least(1)
"""Function that reads a whole number >= 1."""


def some_of(known: Sequence[str], what: str) -> Callable[[str], list[str]]:
    """Return a function that reads names separated by commas; ``what``: word for one name, in errors."""

    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"no {what} {', '.join(map(repr, unknown))}: {', '.join(known)}")
        return text.split(",")

    return names


def parser(
    program: str, doc: str | None, out: str | None, rounds: int = 0, seed: int | None = None, seconds: float = 0.0
) -> Parser:
    """Return a parser with the options that commands share. ``out``: default folder below out/; ``rounds``, ``seed``,
    ``seconds``: defaults of options that only some commands have."""
    p = Parser(program, doc)
    if rounds:
        p.add_argument("--rounds", type=count, default=rounds, help=f"({rounds}); a verdict needs 5")
    if seed is not None:
        p.add_argument("--seed", type=int, default=seed, help=f"({seed})")
    if seconds:
        p.add_argument("--seconds", type=positive, default=seconds, help=f"duration of a round's load ({seconds:g})")
    folder = None if out is None else REPO / "out" / out
    p.add_argument("--out", type=Path, default=folder, help="folder of the result (out/...)")
    return p


@dataclass(frozen=True)
class Command:
    """A benchmark as a command."""

    program: str
    """Module, or a command that begins with "./"."""
    doc: str | None
    run: Callable[[argparse.Namespace], Piece | Iterable[tuple[Piece, Path]]]
    """Function that measures; returns one piece, or yields several with their folders. ``args.say`` shows progress."""
    options: Callable[[Parser], None] = lambda _: None
    """Function that adds the command's own options."""
    check: Callable[[argparse.Namespace], None] = lambda _: None
    """Function that completes the arguments; raises ValueError if they make no sense together."""
    out: str | None = None
    rounds: int = 0
    seed: int | None = None
    seconds: float = 0.0
    every: bool = False
    """True if all figures are printed at the end, not only those with a bar."""
    live: bool = False
    """True if progress is one line that changes."""

    status: Callable[[Piece], int] = lambda _: 0
    """Function that returns the exit code for a piece."""

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Return the arguments, completed. Exits with one line if they are invalid."""
        p = parser(self.program, self.doc, self.out, self.rounds, self.seed, self.seconds)
        self.options(p)
        args = p.parse_args(argv)
        args.say = Progress(live=self.live)
        try:
            self.check(args)
        except ValueError as e:
            p.error(str(e))
        return args

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measure and save the pieces; return the exit code."""
        args = self.parse(argv)
        code = 0
        with command_line(self.program):
            try:
                made = self.run(args)
                for piece, out in [(made, args.out)] if isinstance(made, Piece) else made:
                    args.say.done()
                    piece.save_and_print(out, self.program, argv, every=self.every)
                    code = max(code, self.status(piece))
            finally:
                args.say.done()
        return code


@contextlib.contextmanager
def command_line(program: str) -> Iterator[None]:
    """Handle errors as ``one_line_errors`` does, for a command that starts servers. SIGTERM also stops the servers."""
    import uvloop

    # A shell may have started this process with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    uvloop.install()
    with one_line_errors(program.removeprefix("./run ")):
        yield


@contextlib.contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Report errors that a user can fix in one line."""
    try:
        yield
    except (ConnectionError, ServerError) as e:
        raise SystemExit(f"{command}: {e}") from None
    except KeyboardInterrupt:
        print(f"{command}: interrupted; every server it started has been stopped", file=sys.stderr)
        raise SystemExit(130) from None
