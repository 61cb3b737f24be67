"""Checks of the stock router's flags: each is honoured, refused, or reported as without effect."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields
from urllib.parse import urlsplit

from laps_core.config import ConfigError
from sglang_router.router_args import RouterArgs
from yarl import URL

from . import tracing
from .servers.discovery.names import SCHEME
from .servers.discovery.sources import is_name

logger = logging.getLogger(__name__)

HONOURED = frozenset(
    (
        "mini_lb", "pd_disaggregation", "prefill_urls", "decode_urls", "host", "port", "api_key", "log_level",
        "max_payload_size", "max_concurrent_requests", "request_timeout_secs", "shutdown_grace_period_secs",
        "cors_allowed_origins", "server_cert_path", "server_key_path",
        "client_cert_path", "client_key_path", "ca_cert_paths",
        "queue_size", "queue_timeout_secs", "request_id_headers", "enable_trace", "otlp_traces_endpoint",
        "health_failure_threshold", "health_success_threshold", "health_check_timeout_secs",
        "health_check_interval_secs", "health_check_endpoint", "disable_health_check",
        "retry_max_retries", "retry_initial_backoff_ms", "retry_max_backoff_ms", "retry_backoff_multiplier",
        "retry_jitter_factor", "disable_retries",
        "cb_failure_threshold", "cb_success_threshold", "cb_timeout_duration_secs", "cb_window_duration_secs",
        "disable_circuit_breaker", "control_plane_api_keys",
        "service_discovery", "service_discovery_port", "service_discovery_namespace", "prefill_selector",
        "decode_selector", "bootstrap_port_annotation",
    )
)  # fmt: skip

REFUSED: dict[str, str] = {
    "enable_igw": "one model only is served",
    "control_plane_audit_enabled": "nothing would be audited",
    **dict.fromkeys(("jwt_issuer", "jwt_audience", "jwt_jwks_uri", "jwt_role_mapping"), "no route would be protected"),
}
"""Flags that are refused, because users would rely on their effect. Field -> reason."""

POSITIVE = (
    "max_payload_size", "request_timeout_secs", "health_check_interval_secs", "health_check_timeout_secs",
    "health_failure_threshold", "health_success_threshold", "service_discovery_port",
)  # fmt: skip
"""Fields whose value must be greater than 0."""

OF_DISCOVERY = frozenset(n for n in HONOURED if n.startswith("service_discovery_") or n.endswith("_selector"))
"""Fields without effect unless --service-discovery is given."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
EVERYWHERE = (*LOOPBACK, "0.0.0.0", "::")
"""Values of --host with which the router listens on a loopback address."""

FLAGS = {"server_cert_path": "--tls-cert-path", "server_key_path": "--tls-key-path"}
"""Fields whose flag has another name."""


def check(args: RouterArgs) -> None:
    """Warn of flags without effect. Raises ConfigError if a flag is refused, invalid or missing."""
    _check_urls(args)
    if not args.pd_disaggregation:
        raise ConfigError("--enable-laps-alloc: needs --pd-disaggregation")
    for role in ("prefill", "decode"):
        if not (getattr(args, f"{role}_urls") or (args.service_discovery and getattr(args, f"{role}_selector"))):
            or_selector = f" or --{role}-selector" if args.service_discovery else ""
            raise ConfigError(f"--enable-laps-alloc: needs at least one --{role}{or_selector}")
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    # Values that mean "not given"; defaults of the dataclass and of the command line differ in some fields.
    defaults = RouterArgs(), RouterArgs.from_cli_args(parser.parse_args([]))
    names = [f.name for f in fields(RouterArgs)]
    given = {n for n in names if getattr(args, n) not in (None, *(getattr(d, n) for d in defaults))}
    for name, why in REFUSED.items():
        if name in given:
            raise ConfigError(f"{flag(name)}: not with --enable-laps-alloc: {why}")
    for pair in (("server_cert_path", "server_key_path"), ("client_cert_path", "client_key_path")):
        for name, other in (pair, pair[::-1]):
            if name in given and other not in given:
                raise ConfigError(f"{flag(name)}: needs {flag(other)}")
    for name in POSITIVE:
        if getattr(args, name) <= 0:
            raise ConfigError(f"{flag(name)}: {getattr(args, name)} is not a number > 0")
    for name in ("port", "service_discovery_port"):
        if not 0 <= getattr(args, name) <= 65535:
            raise ConfigError(f"{flag(name)}: {getattr(args, name)} is not a port")
    if args.queue_size < 0:
        raise ConfigError(f"{flag('queue_size')}: {args.queue_size} is not a number >= 0")
    if args.enable_trace:
        tracing.check()
    ignored = sorted(flag(n) for n in given if n not in HONOURED or (n in OF_DISCOVERY and not args.service_discovery))
    if ignored:
        logger.warning("without effect with --enable-laps-alloc: %s", " ".join(ignored))


def flag(name: str) -> str:
    """Return the flag of a field of RouterArgs."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def is_url(url: str) -> bool:
    """Return True if ``url`` is a valid HTTP or HTTPS URL of a server."""
    try:
        parts = urlsplit(url)
        # aiohttp would send a name and a password in the URL instead of the client's key.
        more = parts.query or parts.fragment or parts.username is not None or any(c.isspace() for c in url)
        # Reading ``port`` validates it. The resolver encodes the host, too.
        host = (URL(url).host or "").encode("idna")
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and not more
    except ValueError:
        return False


def is_own(url: str, args: RouterArgs) -> bool:
    """Return True if ``url``, which ``is_url``, leads back to this router: requests would go round until they time
    out."""
    there = URL(url)
    here = there.host == args.host or (there.host in LOOPBACK and args.host in EVERYWHERE)
    return here and there.port == args.port


def _check_urls(args: RouterArgs) -> None:
    given = [("--prefill", url) for url, _ in args.prefill_urls] + [("--decode", url) for url in args.decode_urls]
    for flag, url in given:
        if is_name(url):
            rest = url.replace(SCHEME, "http", 1)
            if not is_url(rest) or urlsplit(rest).path or urlsplit(rest).port is None:
                raise ConfigError(f"{flag}: {url!r} is not the name of several servers, like dns://prefill.llm:30000")
        elif not is_url(url):
            raise ConfigError(f"{flag}: {url!r} is not the URL of a server, like http://10.0.0.1:30000")
        elif is_own(url, args):
            raise ConfigError(f"{flag}: {url!r} is this router itself")
