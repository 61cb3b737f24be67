"""Simulator and planner against real servers, which get the same arrivals.

python -m benchmark.fidelity policies --device h200-qwen3-8b,slow=10    # stock and LAPS on an emulated device
python -m benchmark.fidelity fleet --servers 4       # several of them behind routers
python -m benchmark.fidelity groups                  # data-parallel attention ranks that plan together
python -m benchmark.fidelity planner --keep          # laps-plan's predictions for an emulated device
python -m benchmark.fidelity cpu --rounds 5          # real steps of this CPU; writes the profile "cpu"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from benchmark.fidelity import cpu, fleet, planner, policies, ranks
from benchmark.results.piece import parser
from benchmark.rig.fleet import command_line

KINDS: dict[str, tuple[ModuleType, str | None, str, int]] = {
    "policies": (policies, "emulated", f"rounds at {policies.JUDGED:.0%}% (3); one at the other loads", 3),
    "fleet": (fleet, "emulated-fleet", "", 0),
    "groups": (ranks, None, "(3)", 3),
    "planner": (planner, "planned", "", 0),
    "cpu": (cpu, "validate", "(5)", 5),
}
"""Kind of comparison -> module, folder of its result, help and default of --rounds."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    kind = words.pop(0) if words and words[0] in KINDS else None
    if kind is None:
        p = parser("python -m benchmark.fidelity", __doc__, None, whole=True)
        p.add_argument("kind", choices=tuple(KINDS))
        p.parse_args(words)
        return 2
    module, out, rounds, default = KINDS[kind]
    p = parser(f"python -m benchmark.fidelity {kind}", module.__doc__, out, rounds=rounds, seed=1, whole=True)
    if rounds:
        p.set_defaults(rounds=default)
    module.options(p)
    args = p.parse_args(words)
    with command_line(f"fidelity {kind}"):
        piece = module.run(args)
    piece.leave(args.out, f"benchmark.fidelity {kind}", words, every=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
