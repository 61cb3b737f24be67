"""Command line of the stock router with the LAPS flags, and the choice of the balancer to start.

``LapsRouterArgs`` and ``make_balancer`` replace RouterArgs and MiniLoadBalancer in sglang_router.launch_router, either
by the patch or by our own launcher.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from laps_core.config import ConfigError
from laps_core.pools.config import AllocConfig
from sglang_router.router_args import RouterArgs

from .stock import mini_lb

SWITCH = "enable-laps-alloc"


class LapsRouterArgs(RouterArgs):  # type: ignore[misc]
    """RouterArgs with an AllocConfig if ``--enable-laps-alloc`` is given.

    ``laps`` is not a dataclass field, because the Rust router gets every field as an argument.
    """

    laps: AllocConfig | None = None

    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser, use_router_prefix: bool = False, exclude_host_port: bool = False
    ) -> None:
        """Add the stock flags and the group of LAPS flags."""
        RouterArgs.add_cli_args(parser, use_router_prefix, exclude_host_port)
        add_laps_args(parser, "router-" if use_router_prefix else "")

    @classmethod
    def from_cli_args(cls, args: Any, use_router_prefix: bool = False) -> RouterArgs:
        """Build arguments from parsed flags. A bad LAPS value ends the program: one line on stderr, exit status 2."""
        if isinstance(args, RouterArgs):
            return args
        laps = None
        try:
            laps = parse_laps(args, "router_" if use_router_prefix else "")
            made = super().from_cli_args(args, use_router_prefix)
            if laps and not made.mini_lb:
                raise ConfigError("--enable-laps-alloc: needs --mini-lb")
        except ConfigError as e:
            fail(str(e))
        except ValueError as e:  # of --prefill
            if laps is None:
                raise
            fail(f"--prefill: {e}")
        if laps:
            made.laps = laps
        return made


def make_balancer(router_args: RouterArgs) -> Any:
    """Return the stock MiniLB, or LapsBalancer if allocation is on.

    Ends the program (one line on stderr, exit status 2) if LapsBalancer raises ConfigError.
    """
    config = getattr(router_args, "laps", None)
    if config is None:
        return mini_lb.MiniLoadBalancer(router_args)
    # Imported late, so that the stock router does not load modules that it does not use.
    from .balancer import LapsBalancer

    try:
        return LapsBalancer(router_args, config)
    except ConfigError as e:
        fail(str(e))


def fail(line: str) -> NoReturn:
    """Print an error line to stderr and exit with status 2."""
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)


FLAG_KNOBS = (
    ("threshold", "TOKENS", "Longest short request, in expected new tokens (256 if not given)"),
    ("interval_s", "SECONDS", "Period between rebalancing decisions (5.0 if not given)"),
    ("ratio", "RATIO", "A server moves to a pool with this many times the other's pressure (2.0 if not given)"),
    ("tokenizer", "PATH", "A tokenizer.json or its folder, for exact token counts (estimated from bytes if not given)"),
)
"""Knob, metavar and help of each flag."""


def add_laps_args(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Add the group of LAPS flags. ``parse_laps`` checks the values and reports errors in one line."""
    group = parser.add_argument_group("LAPS", "Length-aware prefill pools (MiniLB)")
    switch = "Route short and long prompts to prefill pools of their own and keep the pools in balance"
    group.add_argument(f"--{prefix}{SWITCH}", action="store_true", help=switch)
    for knob, metavar, text in FLAG_KNOBS:
        group.add_argument(AllocConfig.FLAGS[knob].replace("--", f"--{prefix}"), metavar=metavar, help=text)
    more = "All other knobs, as a JSON object; see docs/ROUTER.md"
    group.add_argument(AllocConfig.JSON_FLAG.replace("--", f"--{prefix}"), metavar="JSON", help=more)


def parse_laps(args: argparse.Namespace, prefix: str = "") -> AllocConfig | None:
    """Return the AllocConfig of parsed flags, or None if allocation is off. Raises ConfigError on a bad value."""

    def value(flag: str) -> Any:
        return getattr(args, prefix + flag.removeprefix("--").replace("-", "_"), None)

    if not value(SWITCH):
        return None
    given = {knob: text for knob, flag in AllocConfig.FLAGS.items() if (text := value(flag)) is not None}
    return AllocConfig.parse(given, value(AllocConfig.JSON_FLAG))
