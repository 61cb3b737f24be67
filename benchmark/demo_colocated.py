"""Demo of servers that prefill and decode: streams that continue while documents arrive, on this machine.

The same streams, documents and short prompts go to a server with LAPS and to a stock one, in turns (A B B A). The
output: one table, one picture of every token, ``piece.json``.
"""

from __future__ import annotations

import sys

from benchmark import colocated
from benchmark.colocated import DEFAULT, LAPS, NAMES
from benchmark.results import Column, Command, Comparison, Namespace, Parser, Piece, Table
from benchmark.results.pictures import tokens
from benchmark.rig import CPU, DEVICES

SHOWN = ("tbt_p99", "tbt_longest", "short_p90", "long_p90")
"""Figures of ``colocated.NAMES`` that the table shows."""
PICTURE = "tokens.png"
STREAM_TOKENS = 160
"""Tokens of each stream: about 4 s on two idle cores, so that the streams still run when the documents arrive."""


def table(result: dict[str, dict[str, float]]) -> Table:
    """Return a table of the figures, with the ratios of LAPS to stock in the last row."""
    columns = tuple(Column(NAMES[figure], (figure,), scale=1e3) for figure in SHOWN)
    title = "Time between tokens of a stream, time to the first one of a prompt (ms)"
    return Comparison({n: [one] for n, one in result.items()}).table(title, "", columns, over=(LAPS, DEFAULT))


def options(p: Parser) -> None:
    colocated.add_load(p, 5, 2, 6)
    p.set_defaults(device=DEVICES[CPU])


def run(args: Namespace) -> Piece:
    seen, decode = colocated.run_rounds((LAPS, DEFAULT), 2 * args.rounds, args, (1, 1), STREAM_TOKENS)
    # Figures over all requests of a variant's rounds.
    result = {
        name: colocated.figures([r for requests, _ in rounds for r in requests], sum(seconds for _, seconds in rounds))
        for name, rounds in seen.items()
    }
    tokens({name: colocated.tokens(rounds[0][0]) for name, rounds in seen.items()}, args.out / PICTURE)
    text = (
        "The same streams, documents and short prompts on one server that prefills and decodes, with LAPS and as stock "
        f"SGLang, in turns. {PICTURE} shows every token."
    )
    captions = {PICTURE: "Each mark is a token of a stream; grey is a document from its arrival to its first token."}
    data = {"variants": result, "load": colocated.settings(args), "decode": decode}
    title = "Streams that go on while documents come"
    return Piece("demo-colocated", title, text, args.seed, [table(result)], [], captions, data)


COMMAND = Command(
    "./run demo colocated", __doc__, run, options, out="demo-colocated", rounds=1, seed=1, seconds=3.0, live=True
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
