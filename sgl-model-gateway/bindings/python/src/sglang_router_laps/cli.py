"""The router's command line with the LAPS flags added."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from laps_core.config import ConfigError
from sglang_router.router_args import RouterArgs

from .config import AllocConfig


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


def fail(line: str) -> NoReturn:
    """Say what is wrong with the command line and exit with status 2."""
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(2)


def add_laps_args(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Add the LAPS group. Values are checked by ``parse_laps``, which says in one line what is wrong."""
    group = parser.add_argument_group("LAPS", "Length-aware prefill pools (MiniLB with two or more prefill servers)")
    group.add_argument(
        f"--{prefix}enable-laps-alloc",
        action="store_true",
        help="Route short and long prompts to prefill pools of their own and keep the pools in balance",
    )
    group.add_argument(
        f"--{prefix}laps-alloc-threshold",
        metavar="TOKENS",
        help="Longest short request, in expected new tokens (256 if not given)",
    )
    group.add_argument(
        f"--{prefix}laps-rebalance-interval-s",
        metavar="SECONDS",
        help="How often the pools are reconsidered (5.0 if not given)",
    )
    group.add_argument(
        f"--{prefix}laps-rebalance-ratio",
        metavar="RATIO",
        help="How many times the other pool's pressure moves an instance (2.0 if not given)",
    )
    group.add_argument(
        f"--{prefix}laps-tokenizer",
        metavar="PATH",
        help="A tokenizer.json or its folder, for exact token counts; without it they are estimated from bytes",
    )
    group.add_argument(
        f"--{prefix}laps-alloc-config", metavar="JSON", help="All other knobs, as a JSON object; see docs/ROUTER.md"
    )


def parse_laps(args: argparse.Namespace, prefix: str = "") -> AllocConfig | None:
    """The AllocConfig of parsed flags; None when allocation is off. Raises ConfigError on a bad value."""
    flags = {k.removeprefix(prefix): v for k, v in vars(args).items()}
    if not flags.get("enable_laps_alloc"):
        return None
    given: dict[str, Any] = {}
    for name, flag, kind in (
        ("threshold", "laps_alloc_threshold", int),
        ("interval_s", "laps_rebalance_interval_s", float),
        ("ratio", "laps_rebalance_ratio", float),
        ("tokenizer", "laps_tokenizer", str),
    ):
        text = flags.get(flag)
        if text is None:
            continue
        try:
            given[name] = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"--{flag.replace('_', '-')}: {text!r} is not {what}") from None
    return AllocConfig.parse(given, flags.get("laps_alloc_config"))
