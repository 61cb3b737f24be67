"""``python -m sglang_router_laps.launch_router``: the stock launcher with the LAPS flags, no patch needed."""

from __future__ import annotations

from .cli import LapsRouterArgs, make_balancer  # first: it imports MiniLB without SGLang

from sglang_router import launch_router as stock  # isort: skip


def main() -> None:
    """Run the stock launcher with our argument class and balancer."""
    stock.RouterArgs = LapsRouterArgs
    stock.MiniLoadBalancer = make_balancer
    stock.main()


if __name__ == "__main__":
    main()
