"""One page from all benchmarks: ``benchmark/report/README.md``, raw JSON and pictures beside it, ``bench.json``.

    python -m benchmark.report                            # run everything (over an hour on two cores), then write
    python -m benchmark.report --only headline,window     # run these, use earlier results for the others
    python -m benchmark.report --from out/report          # run nothing

The page lists failed and missing pieces. The README's table and picture are updated, too.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark.results import page, steps
from benchmark.rig import devices
from benchmark.rig.model import REPO
from benchmark.rig.progress import Progress

PAGE = REPO / "benchmark" / "report"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="./run report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"run some of these, separated by commas: {', '.join(steps.STEPS)}")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="run nothing, take results from here")
    parser.add_argument("--work", type=Path, default=REPO / "out" / "report", help="folder of the commands' results")
    parser.add_argument("--out", type=Path, default=PAGE, help="folder of the page; it is replaced (benchmark/report)")
    parser.add_argument("--readme", type=Path, default=REPO / "README.md", help="file whose headline is replaced")
    args = parser.parse_args(argv)
    wanted = args.only.split(",") if args.only else list(steps.STEPS)
    unknown = [name for name in wanted if name not in steps.STEPS]
    if unknown:
        parser.exit(2, f"{parser.prog}: no step {', '.join(unknown)}: {', '.join(steps.STEPS)}\n")
    if args.source and args.only:
        parser.exit(2, f"{parser.prog}: --from runs nothing, --only runs some: one of them\n")
    if args.source and not args.source.is_dir():
        parser.exit(2, f"{parser.prog}: {args.source} is not a folder\n")
    if not args.readme.is_file():
        parser.exit(2, f"{parser.prog}: {args.readme} is not a file\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say = Progress()
    failed: dict[str, str] = {}
    if not args.source:
        for name in wanted:
            step = steps.STEPS[name]
            if step.gpu and not devices.has_cuda():
                say(f"{name}: not run: needs a GPU")
                continue
            wrong = steps.run(name, step, args.work, say)
            if wrong:
                failed[name] = wrong
                say(f"{name}: {wrong}")
    collected = steps.collect(args.source or args.work, failed)
    try:
        page.write(collected, args.out)
    except ValueError as e:
        parser.exit(2, f"{parser.prog}: {e}\n")
    where = args.out.resolve()
    inside = where.is_relative_to(args.readme.resolve().parent)
    folder = str(where.relative_to(args.readme.resolve().parent)) if inside else str(where)
    if page.HEADLINE in collected.pieces:
        content = page.headline(collected.pieces[page.HEADLINE][0], folder)
        args.readme.write_text(page.put(args.readme.read_text(), page.HEADLINE, content))
    for name, why in collected.missing.items():
        say(f"missing: {name}: {why}")
    say(f"{len(collected.pieces)} pieces: {args.out / 'README.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
