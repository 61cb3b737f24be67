"""What becomes of each flag of the stock router here: honoured, refused, or said to be without effect."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields
from functools import cache
from urllib.parse import urlsplit

from laps_core.config import ConfigError
from sglang_router.router_args import RouterArgs

from .request.retries import RetryConfig
from .servers.breaker import BreakerConfig
from .servers.health import HealthConfig

logger = logging.getLogger(__name__)

HONOURED = frozenset(
    (
        "mini_lb", "pd_disaggregation", "prefill_urls", "decode_urls", "host", "port", "api_key", "log_level",
        "max_payload_size", "max_concurrent_requests", "request_timeout_secs", "shutdown_grace_period_secs",
        "cors_allowed_origins", "server_cert_path", "server_key_path",
        "health_failure_threshold", "health_success_threshold", "health_check_timeout_secs",
        "health_check_interval_secs", "health_check_endpoint", "disable_health_check",
        "retry_max_retries", "retry_initial_backoff_ms", "retry_max_backoff_ms", "retry_backoff_multiplier",
        "retry_jitter_factor", "disable_retries",
        "cb_failure_threshold", "cb_success_threshold", "cb_timeout_duration_secs", "cb_window_duration_secs",
        "disable_circuit_breaker",
    )
)  # fmt: skip

REFUSED: dict[str, str] = {
    "service_discovery": "servers are given by --prefill and --decode; none would be discovered",
    "enable_igw": "one model only is served",
    "client_cert_path": "the router shows no certificate to the servers",
    "client_key_path": "the router shows no certificate to the servers",
    "ca_cert_paths": "servers are checked against the system's certificates; SSL_CERT_FILE changes those",
    "control_plane_api_keys": "no route would be protected",
    "control_plane_audit_enabled": "nothing would be audited",
    "jwt_issuer": "no route would be protected",
    "jwt_audience": "no route would be protected",
    "jwt_jwks_uri": "no route would be protected",
    "jwt_role_mapping": "no route would be protected",
}
"""Where silence would be dangerous: who gives one of these relies on it. Field -> why."""

IGNORED = frozenset(
    (
        "worker_urls", "policy", "prefill_policy", "decode_policy", "worker_startup_timeout_secs",
        "worker_startup_check_interval", "cache_threshold", "balance_abs_threshold", "balance_rel_threshold",
        "eviction_interval_secs", "max_tree_size", "max_idle_secs", "assignment_mode", "bucket_adjust_interval_secs",
        "dp_aware", "log_dir", "selector", "service_discovery_port", "service_discovery_namespace", "prefill_selector",
        "decode_selector", "bootstrap_port_annotation", "prometheus_port", "prometheus_host",
        "prometheus_duration_buckets", "request_id_headers", "queue_size", "queue_timeout_secs",
        "rate_limit_tokens_per_second", "model_path", "tokenizer_path", "chat_template", "tokenizer_cache_enable_l0",
        "tokenizer_cache_l0_max_entries", "tokenizer_cache_enable_l1", "tokenizer_cache_l1_max_memory",
        "reasoning_parser", "tool_call_parser", "mcp_config_path", "backend", "history_backend", "oracle_wallet_path",
        "oracle_tns_alias", "oracle_connect_descriptor", "oracle_username", "oracle_password", "oracle_pool_min",
        "oracle_pool_max", "oracle_pool_timeout_secs", "postgres_db_url", "postgres_pool_max", "redis_url",
        "redis_pool_max", "redis_retention_days", "enable_trace", "otlp_traces_endpoint",
    )
)  # fmt: skip
"""Without effect here; given a value, each is named in one warning."""

FLAGS = {"server_cert_path": "--tls-cert-path", "server_key_path": "--tls-key-path"}
"""Fields whose flag has another name."""


def check(args: RouterArgs) -> None:
    """Refuse or warn of what is given and has no effect. Raises ConfigError."""
    given = {f.name for f in fields(RouterArgs) if _given(args, f.name)}
    for name, why in REFUSED.items():
        if name in given:
            raise ConfigError(f"{flag(name)}: not with --enable-laps-alloc: {why}")
    for name, other in (("server_cert_path", "server_key_path"), ("server_key_path", "server_cert_path")):
        if name in given and other not in given:
            raise ConfigError(f"{flag(name)}: needs {flag(other)}")
    if args.max_payload_size < 1:
        raise ConfigError(f"{flag('max_payload_size')}: {args.max_payload_size} is not a number of bytes >= 1")
    ignored = sorted(flag(name) for name in given & IGNORED)
    if ignored:
        logger.warning("without effect with --enable-laps-alloc: %s", " ".join(ignored))


def flag(name: str) -> str:
    """The flag of a field of RouterArgs."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def _given(args: RouterArgs, name: str) -> bool:
    value = getattr(args, name)
    return value is not None and all(value != getattr(default, name) for default in _defaults())


@cache
def _defaults() -> tuple[RouterArgs, RouterArgs]:
    """The arguments of a caller and of a command line that give none; they differ in some."""
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    return RouterArgs(), RouterArgs.from_cli_args(parser.parse_args([]))


def health_config(args: RouterArgs) -> HealthConfig:
    """Of --health-*."""
    return HealthConfig(
        endpoint=args.health_check_endpoint,
        interval_s=args.health_check_interval_secs,
        timeout_s=args.health_check_timeout_secs,
        failures=args.health_failure_threshold,
        successes=args.health_success_threshold,
        probe=not args.disable_health_check,
    )


def breaker_config(args: RouterArgs) -> BreakerConfig:
    """Of --cb-*."""
    return BreakerConfig(
        failures=0 if args.disable_circuit_breaker else max(0, args.cb_failure_threshold),
        successes=args.cb_success_threshold,
        timeout_s=args.cb_timeout_duration_secs,
        window_s=args.cb_window_duration_secs,
    )


def retry_config(args: RouterArgs) -> RetryConfig:
    """Of --retry-*."""
    return RetryConfig(
        # As the stock flags count: the first try is one of them.
        attempts=1 if args.disable_retries else max(1, args.retry_max_retries),
        backoff_s=args.retry_initial_backoff_ms / 1e3,
        backoff_max_s=args.retry_max_backoff_ms / 1e3,
        growth=args.retry_backoff_multiplier,
        jitter=args.retry_jitter_factor,
    )


def check_urls(args: RouterArgs) -> None:
    """Raise ConfigError for what no request could be sent to."""
    given = [("--prefill", url) for url, _ in args.prefill_urls] + [("--decode", url) for url in args.decode_urls]
    for flag, url in given:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
            # Reading it is what checks it.
            good = good and parts.port != 0 and not any(c.isspace() for c in url)
        except ValueError:
            good = False
        if not good:
            raise ConfigError(f"{flag}: {url!r} is not the URL of a server, like http://10.0.0.1:30000")
