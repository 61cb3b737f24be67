"""All measurements that need a machine with a GPU, in half an hour and without the internet.

    ./run gpu                          # everything, into out/gpu; after an interruption, run it again to continue
    ./run gpu --only slices,answers    # some of it
    ./run gpu --dry-run                # the same code on a machine without a GPU: emulated devices, tiny models

Each piece takes at most four minutes and is written when it is done. The end result is one page, with one JSON file
(bench.json) beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from laps_plan.traffic.job import THRESHOLD

from benchmark.gpu.answers import answers
from benchmark.gpu.kit import Kit
from benchmark.gpu.ladder import TINY, ladder
from benchmark.gpu.latency import TOKENS, latency
from benchmark.gpu.loads import graph_figures, loads, lone
from benchmark.load import Prompts
from benchmark.results import Namespace, Piece, command_line, page, parser, positive, some_of, steps
from benchmark.results.machine import machine
from benchmark.rig import BUILT_IN, FCFS, GRAPHS, LAPS, SMALL, SPF, Fleet, Progress, ServerError, devices, get_json
from benchmark.rig.devices import CUDA, DEVICES, Device
from benchmark.serve import command as serve
from benchmark.serve import slices

LADDERS = ("0.5B", "7B")
SERVED = ("slices", "mixed", "azure", "lone", "code", "closed")
NAMES = (FCFS, SPF, SMALL, LAPS)
"""Variants whose servers the pieces of SERVED share."""
GRAPHED = (FCFS, LAPS, GRAPHS)
"""Servers of the piece about full graphs."""
DRY = "emulated:h200-qwen3-8b,slow=1"
AGENTS_TOKENS = 420_000
"""KV pool (tokens) of the two servers that keep the histories of agents."""
AGENTS_PER_S = "4.9"
"""Turns of agents per second that an H200 serves with an 8B model, according to its profile."""
CHUNK, LONGEST = slices.TOKENS, 16384


class Run:
    """One run of the kit."""

    def __init__(self, kit: Kit, args: Namespace) -> None:
        self.kit, self.args, self.dry, self.work = kit, args, bool(args.dry_run), kit.out / "work"
        base: Device = devices.this(DRY) if self.dry else DEVICES[CUDA]
        self.device = replace(base, chunk=CHUNK)
        self.prompts = Prompts(base.vocabulary, args.seed, LONGEST)

    def alone(self) -> None:
        """Run the pieces that have servers or processes of their own."""
        import torch

        kit, seed, say, cuda = self.kit, self.args.seed, self.kit.say, not self.dry
        kit.measure("loads", lambda: loads(self.device, self.prompts, self.work / "loads", seed, say, cuda=cuda))
        kit.measure("answers", lambda: answers(self.work / "answers", seed, say, cuda=cuda))
        if self.dry or torch.cuda.device_count() > 1:
            kit.measure("answers-tp2", lambda: answers(self.work / "tp2", seed, say, cuda=cuda, ranks=2))
        elif kit.wants("answers-tp2"):
            kit.miss(["answers-tp2"], "needs two GPUs")
        gpu, most = str(machine().get("gpus", "")), CHUNK if self.dry else TOKENS[-1]
        kit.measure("latency", lambda: latency(self.device, gpu, self.work / "latency", seed, say, most))
        for shape in LADDERS:
            kit.measure(f"ladder-{shape}", partial(ladder, TINY if self.dry else shape))

    def served(self, pieces: Sequence[str], names: Sequence[str]) -> None:
        """Run the pieces that share these servers."""
        wanted = [name for name in pieces if self.kit.wants(name)]
        if not wanted:
            return
        found, out = [BUILT_IN[name] for name in names], self.work / "-".join(wanted)
        try:
            with Fleet(self.device, found, self.prompts, out, self.kit.say, together=True) as fleet:
                for name in wanted:
                    own = {"slices": self._slices, "lone": self._lone}.get(name)
                    self.kit.measure(name, partial(own, fleet) if own else self._workload(name, fleet, names))
        except (ServerError, ConnectionError) as e:
            self.kit.miss([name for name in wanted if self.kit.wants(name)], str(e))

    def _slices(self, fleet: Fleet) -> Piece:
        return slices.piece_of(slices.measure(fleet, self.args.rounds, self.args.seed), fleet.device, self.args.seed)

    def _lone(self, fleet: Fleet) -> Piece:
        return lone(fleet, NAMES, self.args.seed, **({"rounds": 3} if self.dry else {}))

    def agents(self) -> None:
        """Run sessions of agents, on separate servers that keep the histories."""
        device = self.device
        if not self.dry:
            device = replace(device.with_prefixes(AGENTS_TOKENS), server_gib=38.0)
        self.kit.measure("agents", self._workload("agents", None, (SPF, LAPS), device))

    def _workload(
        self, name: str, fleet: Fleet | None, names: Sequence[str], device: Device | None = None
    ) -> Callable[[], Piece]:
        args, device = self.args, device or self.device
        loop = name in ("closed", "graphs")
        seconds = min(args.seconds, 4.0) if loop else args.seconds
        words = ["--workload", "closed" if loop else name, "--variants", ",".join(names), "--rounds", str(args.rounds)]
        words += ["--seconds", str(seconds), "--seed", str(args.seed), "--out", str(self.kit.folder(name))]
        if name == "agents":
            # The capacity is given, because a closed loop of agents' turns would take an hour.
            words += ["--capacity", AGENTS_PER_S]
        else:
            device = replace(device, longest=THRESHOLD if name == "graphs" else LONGEST)
        if loop:
            words += ["--concurrency", *(("8",) if self.dry else ("1", "8", "32", "128"))]

        def make() -> Piece:
            asked = serve.COMMAND.parse([*words, "--device", DRY if self.dry else CUDA])
            asked.device = device
            ((piece, _),) = serve.run(asked, fleet)
            if fleet and name == "graphs":
                fleet.target(GRAPHS)
                status = get_json(fleet.prefill(GRAPHS), "/laps_status") or {}
                piece.title = "Full graphs for short prompts"
                piece.figures = [*graph_figures(piece.data["points"], status.get("graphs", {})), *piece.figures]
            return piece

        return make


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("./run gpu", __doc__, "gpu", rounds=3, seed=1, seconds=8.0)
    p.add_argument("--dry-run", action="store_true", help="on a machine without a GPU: emulated devices, tiny models")
    p.add_argument("--minutes", type=positive, default=30.0, help="start no piece after this many minutes (30)")
    words = f"some of {','.join(steps.GPU)}"
    p.add_argument("--only", type=some_of(steps.GPU, "piece"), default=list(steps.GPU), help=words)
    args = p.parse_args(argv)
    if not args.dry_run and not devices.has_cuda():
        p.error("there is no CUDA device here: --dry-run runs the same code without one")
    if args.dry_run:
        args.rounds = 1
        args.out = args.out.with_name(args.out.name + "-dry") if args.out.name == "gpu" else args.out
        # In a dry run all ladders have the same tiny shape, and there are no graphs.
        args.only = [name for name in args.only if name not in ("graphs", f"ladder-{LADDERS[-1]}")]
    kit = Kit(args.out, Progress(), args.only, args.minutes, argv)
    run = Run(kit, args)
    with command_line("./run gpu"):
        run.alone()
        run.served(SERVED, NAMES)
        run.served(("graphs",), GRAPHED)
        run.agents()
    collected = kit.collected([name for name in steps.GPU if name in args.only])
    made = args.out / "page"
    page.write(collected, made)
    kit.say(f"{len(collected.pieces)} pieces: {made / 'README.md'}")
    for name, why in collected.missing.items():
        kit.say(f"missing: {name}: {why}")
    return 1 if kit.missing else 0


if __name__ == "__main__":
    sys.exit(main())
