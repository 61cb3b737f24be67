"""Simulator and planner against real servers, which get the same arrivals.

python -m benchmark.fidelity policies --device h200-qwen3-8b,slow=10    # stock and LAPS on an emulated device
python -m benchmark.fidelity fleet --servers 4       # several of them behind routers
python -m benchmark.fidelity groups                  # data-parallel attention ranks that plan together
python -m benchmark.fidelity planner --keep          # laps-plan's predictions for an emulated device
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmark.fidelity import fleet, planner, policies, ranks
from benchmark.results import Parser

KINDS = {
    "policies": policies.COMMAND, "fleet": fleet.COMMAND, "groups": ranks.COMMAND, "planner": planner.COMMAND,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in KINDS:
        return KINDS[words[0]].main(words[1:])
    p = Parser("benchmark.fidelity", __doc__)
    p.add_argument("kind", choices=tuple(KINDS))
    p.parse_args(words[:1])
    return 2


if __name__ == "__main__":
    sys.exit(main())
