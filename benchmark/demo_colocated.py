"""One server that prefills and decodes, seen: streams that go on while documents come, on this machine.

The same streams, documents and short prompts go to a server with LAPS and to a stock one, in turns (A B B A). What
comes out: one table, one picture of every token, ``piece.json``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmark import colocated
from benchmark.colocated import DEFAULT, LAPS, NAMES, Request
from benchmark.results.pictures import tokens
from benchmark.results.piece import Piece, Table, count, parser, positive
from benchmark.results.rounds import in_turns
from benchmark.rig import servers
from benchmark.rig.devices import CPU, DEVICES
from benchmark.rig.fleet import command_line
from benchmark.rig.progress import Progress

SHOWN = ("tbt_p99", "tbt_longest", "short_p90", "long_p90")
"""Figures shown, out of ``colocated.NAMES``."""
PICTURE = "tokens.png"
STREAM_TOKENS = 160
"""Tokens of each stream: some 4 s on two cores, while nothing else runs."""
Rounds = dict[str, list[tuple[list[Request], float]]]
"""By variant: the requests of each round, answered, and how long it took (seconds)."""


def lasting(requests: list[Request]) -> list[Request]:
    """The same with streams that are still there when the documents come."""
    return [replace(r, new=STREAM_TOKENS) if r.kind == "stream" else r for r in requests]


def summary(rounds: Sequence[tuple[list[Request], float]]) -> dict[str, float]:
    """``colocated.NAMES`` over all requests of a variant's rounds."""
    return colocated.figures([r for requests, _ in rounds for r in requests], sum(seconds for _, seconds in rounds))


def table(result: dict[str, dict[str, float]]) -> Table:
    """The figures, and the ratio of LAPS to stock below them."""
    rows = [(name, *(f"{1e3 * of[figure]:.0f}" for figure in SHOWN)) for name, of in result.items()]
    rows.append(("laps / stock", *(f"{result[LAPS][figure] / result[DEFAULT][figure]:.2f}" for figure in SHOWN)))
    heads = ("", *(NAMES[figure] for figure in SHOWN))
    return Table("Time between tokens of a stream, time to the first one of a prompt (ms)", heads, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every token came."""
    p = parser(
        "./run demo colocated", __doc__, "demo-colocated", rounds="two each, so many times (1)", seed=1, seconds=3.0,
        whole=True,
    )  # fmt: skip
    p.set_defaults(rounds=1, device=DEVICES[CPU])
    for flag, default in (("streams", 5), ("longs", 2), ("shorts", 6)):
        p.add_argument(f"--{flag}", type=count, default=default, help=f"({default})")
    p.add_argument("--tbt-ms", type=positive, help="--laps-tbt-ms (derived)")
    args = p.parse_args(argv)
    progress = Progress(live=True)
    with command_line("demo colocated"):
        progress("making the model")
        both = {name: colocated.server(name, args.out, args) for name in (LAPS, DEFAULT)}
        try:
            with servers.running(*both.values(), say=progress):

                def once(i: int, name: str) -> tuple[list[Request], float]:
                    requests = lasting(colocated.load(args.seed + i, args))
                    return requests, asyncio.run(colocated.serve(both[name].url, requests))

                for name in both:
                    progress(f"warming up {name}")
                    colocated.warm_up(both[name].url, args, streams=1, longs=1)
                seen: Rounds = in_turns(tuple(both), 2 * args.rounds, once, progress)
                decode = both[LAPS].laps_status()["decode"]
        finally:
            progress.done()
    result = {name: summary(rounds) for name, rounds in seen.items()}
    settings = {key: getattr(args, key) for key in ("streams", "longs", "shorts", "seconds", "tbt_ms")}
    piece = Piece(
        name="demo-colocated",
        title="Streams that go on while documents come",
        text="The same streams, documents and short prompts on one server that prefills and decodes, with LAPS and as "
        "stock SGLang, in turns.",
        seed=args.seed,
        tables=[table(result)],
        pictures={PICTURE: "Each mark is a token of a stream; grey is a document from its arrival to its first token."},
        data={"variants": result, "load": settings, "decode": decode},
    )
    tokens({name: colocated.tokens(rounds[0][0]) for name, rounds in seen.items()}, args.out / PICTURE)
    piece.leave(args.out, "benchmark.demo_colocated", argv)
    print(args.out / PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
