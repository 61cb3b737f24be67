"""One page from all benchmarks: ``benchmark/report/README.md``, raw JSON and pictures beside it, ``bench.json``.

    python -m benchmark.report                            # run everything (under three hours on two cores), then write
    python -m benchmark.report --only headline,closed     # run these, use earlier results for the others
    python -m benchmark.report --from out/report          # run nothing

The page lists failed and missing pieces. The README's tables and picture are updated, too.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark.results import Parser, page, some_of, steps
from benchmark.rig import REPO, Progress, has_cuda

PAGE = REPO / "benchmark" / "report"


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser("./run report", __doc__)
    words = f"run some of these, separated by commas: {', '.join(steps.STEPS)}"
    p.add_argument("--only", type=some_of(list(steps.STEPS), "step"), help=words)
    p.add_argument("--from", dest="source", type=folder, metavar="DIR", help="run nothing, take results from here")
    p.add_argument("--work", type=Path, default=REPO / "out" / "report", help="folder of the commands' results")
    p.add_argument("--out", type=Path, default=PAGE, help="folder of the page; it is replaced (benchmark/report)")
    p.add_argument("--readme", type=Path, default=REPO / "README.md", help="file whose headline is replaced")
    args = p.parse_args(argv)
    if args.source and args.only:
        p.error("--from runs nothing, --only runs some: one of them")
    if not args.readme.is_file():
        p.error(f"{args.readme} is not a file")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say, failed = Progress(), dict[str, str]()
    for name in () if args.source else args.only or steps.STEPS:
        step = steps.STEPS[name]
        if step.gpu and not has_cuda():
            say(f"{name}: not run: needs a GPU")
        elif wrong := steps.run(name, step, args.work, say):
            failed[name] = wrong
            say(f"{name}: {wrong}")
    collected = steps.collect(args.source or args.work, failed)
    try:
        page.write(collected, args.out)
    except ValueError as e:
        p.error(str(e))
    where, root = args.out.resolve(), args.readme.resolve().parent
    near = str(where.relative_to(root)) if where.is_relative_to(root) else str(where)
    for name, shown in page.IN_README.items():
        if name in collected.pieces:
            content = shown(collected.pieces[name][0], near)
            args.readme.write_text(page.put(args.readme.read_text(), name, content))
    for name, why in collected.missing.items():
        say(f"missing: {name}: {why}")
    say(f"{len(collected.pieces)} pieces: {args.out / 'README.md'}")
    return 1 if failed else 0


def folder(text: str) -> Path:
    """Return the path of an existing folder."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
