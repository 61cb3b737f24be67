"""What stands in for two names of sglang_router.launch_router, by the patch or by our own launcher."""

from __future__ import annotations

import logging

from laps_core.config import ConfigError
from sglang_router.mini_lb import MiniLoadBalancer
from sglang_router.router_args import RouterArgs

from .cli import LapsRouterArgs, fail

__all__ = ["LapsRouterArgs", "make_balancer"]

logger = logging.getLogger(__name__)


def make_balancer(router_args: RouterArgs) -> MiniLoadBalancer:
    """The stock MiniLB, or ours when allocation is on and there are prefill instances to allocate.

    Ends the program (one line on stderr, exit status 2) when the instances given do not fit the configuration.
    """
    config = getattr(router_args, "laps", None)
    if config is None:
        return MiniLoadBalancer(router_args)
    if len(router_args.prefill_urls) < 2:
        logger.warning("--enable-laps-alloc needs at least 2 --prefill; allocation is off, this is the stock MiniLB")
        return MiniLoadBalancer(router_args)
    # Only now: the stock router must not pay for importing what it does not use.
    from .balancer import LapsMiniLoadBalancer

    try:
        return LapsMiniLoadBalancer(router_args, config)
    except ConfigError as e:
        fail(str(e))
