"""The router's command line with the LAPS flags added, and what it starts.

``LapsRouterArgs`` and ``make_balancer`` stand in for two names of sglang_router.launch_router, by the patch or by our
own launcher.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from laps_core.config import ConfigError
from sglang_router.router_args import RouterArgs

from .config import AllocConfig
from .stock import mini_lb

SWITCH = "enable-laps-alloc"


class LapsRouterArgs(RouterArgs):  # type: ignore[misc]
    """RouterArgs that also carry an AllocConfig when ``--enable-laps-alloc`` is given.

    ``laps`` is no dataclass field: the Rust router takes every field it finds as an argument of its own.
    """

    laps: AllocConfig | None = None

    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser, use_router_prefix: bool = False, exclude_host_port: bool = False
    ) -> None:
        """Add the stock flags and the LAPS group."""
        RouterArgs.add_cli_args(parser, use_router_prefix, exclude_host_port)
        add_laps_args(parser, "router-" if use_router_prefix else "")

    @classmethod
    def from_cli_args(cls, args: Any, use_router_prefix: bool = False) -> RouterArgs:
        """Build from parsed flags. A bad LAPS value ends the program: one line on stderr, exit status 2."""
        if isinstance(args, RouterArgs):
            return args
        made = super().from_cli_args(args, use_router_prefix)
        try:
            laps = parse_laps(args, "router_" if use_router_prefix else "")
            if laps and not made.mini_lb:
                raise ConfigError("--enable-laps-alloc: needs --mini-lb")
        except ConfigError as e:
            fail(str(e))
        if laps:
            made.laps = laps
        return made


def make_balancer(router_args: RouterArgs) -> Any:
    """The stock MiniLB, or ours when allocation is on and there are prefill instances to allocate.

    Ends the program (one line on stderr, exit status 2) when the instances given do not fit the configuration.
    """
    config = getattr(router_args, "laps", None)
    if config is None:
        return mini_lb.MiniLoadBalancer(router_args)
    # Only now: the stock router must not pay for importing what it does not use.
    from .balancer import LapsBalancer

    try:
        return LapsBalancer(router_args, config)
    except ConfigError as e:
        fail(str(e))


def fail(line: str) -> NoReturn:
    """Say what is wrong with the command line and exit with status 2."""
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)


FLAG_KNOBS = (
    ("threshold", "TOKENS", "Longest short request, in expected new tokens (256 if not given)"),
    ("interval_s", "SECONDS", "How often the pools are reconsidered (5.0 if not given)"),
    ("ratio", "RATIO", "How many times the other pool's pressure moves an instance (2.0 if not given)"),
    ("tokenizer", "PATH", "A tokenizer.json or its folder, for exact token counts; else estimated from bytes"),
    ("router_workers", "N", "Processes behind the port, each a router of its own (1 if not given)"),
)
"""Knob, what its flag takes, and its help."""


def add_laps_args(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Add the LAPS group. Values are checked by ``parse_laps``, which says in one line what is wrong."""
    group = parser.add_argument_group("LAPS", "Length-aware prefill pools (MiniLB)")
    switch = "Route short and long prompts to prefill pools of their own and keep the pools in balance"
    group.add_argument(f"--{prefix}{SWITCH}", action="store_true", help=switch)
    for knob, metavar, text in FLAG_KNOBS:
        group.add_argument(AllocConfig.FLAGS[knob].replace("--", f"--{prefix}"), metavar=metavar, help=text)
    more = "All other knobs, as a JSON object; see docs/ROUTER.md"
    group.add_argument(AllocConfig.JSON_FLAG.replace("--", f"--{prefix}"), metavar="JSON", help=more)


def parse_laps(args: argparse.Namespace, prefix: str = "") -> AllocConfig | None:
    """The AllocConfig of parsed flags; None when allocation is off. Raises ConfigError on a bad value."""

    def value(flag: str) -> Any:
        return getattr(args, prefix + flag.removeprefix("--").replace("-", "_"), None)

    if not value(SWITCH):
        return None
    given = {knob: text for knob, flag in AllocConfig.FLAGS.items() if (text := value(flag)) is not None}
    return AllocConfig.parse(given, value(AllocConfig.JSON_FLAG))
