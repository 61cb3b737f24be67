"""Sources of servers named on the command line."""

from __future__ import annotations

from laps_core.config import ConfigError
from sglang_router.router_args import RouterArgs

from . import Source
from .names import SCHEME, Name


def is_name(url: str) -> bool:
    """Return True if ``url`` is a DNS name that stands for several servers."""
    return url.startswith(f"{SCHEME}:")


def sources(args: RouterArgs) -> list[Source]:
    """Return the sources named by --prefill, --decode and --service-discovery. Raises ConfigError if the package for
    the latter is missing."""
    found: list[Source] = [Name("prefill", url, port) for url, port in args.prefill_urls if is_name(url)]
    found += [Name("decode", url) for url in args.decode_urls if is_name(url)]
    if args.service_discovery:
        try:
            # Imported late: it takes longer to import than the whole router.
            from .pods import Pods
        except ImportError as e:
            raise ConfigError(f"--service-discovery: needs pip install 'sglang-laps[kubernetes]': {e}") from None
        port, namespace = args.service_discovery_port, args.service_discovery_namespace
        annotation = args.bootstrap_port_annotation
        if args.prefill_selector:
            found.append(Pods("prefill", args.prefill_selector, port, namespace, annotation))
        if args.decode_selector:
            found.append(Pods("decode", args.decode_selector, port, namespace, annotation))
    return found
