"""Flags of the stock router under LAPS: honoured, refused, or without effect."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import ipaddress
import logging
import ssl
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sglang_router.router_args import RouterArgs
from sglang_router_laps.cli import make_balancer
from sglang_router_laps.stock_flags import HONOURED, REFUSED, flag

from .fakes import Stack, serving, stack
from .test_args import TWO, parse

LAPS = (*TWO, "--enable-laps-alloc")

IGNORED = frozenset(
    (
        "worker_urls", "policy", "prefill_policy", "decode_policy", "worker_startup_timeout_secs",
        "worker_startup_check_interval", "cache_threshold", "balance_abs_threshold", "balance_rel_threshold",
        "eviction_interval_secs", "max_tree_size", "max_idle_secs", "assignment_mode", "bucket_adjust_interval_secs",
        "dp_aware", "log_dir", "selector", "prometheus_port", "prometheus_host",
        "prometheus_duration_buckets", "rate_limit_tokens_per_second",
        "model_path", "tokenizer_path", "chat_template", "tokenizer_cache_enable_l0",
        "tokenizer_cache_l0_max_entries", "tokenizer_cache_enable_l1", "tokenizer_cache_l1_max_memory",
        "reasoning_parser", "tool_call_parser", "mcp_config_path", "backend", "history_backend", "oracle_wallet_path",
        "oracle_tns_alias", "oracle_connect_descriptor", "oracle_username", "oracle_password", "oracle_pool_min",
        "oracle_pool_max", "oracle_pool_timeout_secs", "postgres_db_url", "postgres_pool_max", "redis_url",
        "redis_pool_max", "redis_retention_days",
    )
)  # fmt: skip


def test_every_stock_argument_is_classified_once() -> None:
    """Fails for a release with a new flag, whose treatment must then be decided."""
    assert {f.name for f in fields(RouterArgs)} == HONOURED | REFUSED.keys() | IGNORED
    assert len(HONOURED) + len(REFUSED) + len(IGNORED) == len(fields(RouterArgs))


def test_flag_names_of_stock_arguments_exist() -> None:
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    known = {s for action in parser._actions for s in action.option_strings}
    made_from_others = {"prefill_urls", "decode_urls", "bootstrap_port_annotation"}
    assert {flag(f.name) for f in fields(RouterArgs) if f.name not in made_from_others} <= known


def test_default_flags_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    make_balancer(parse(*LAPS))
    assert not caplog.records


@pytest.mark.parametrize(
    "flags",
    [
        ["--enable-igw"],
        ["--client-cert-path", "c.pem"],
        ["--client-key-path", "k.pem"],
        ["--ca-cert-paths", "ca.pem"],
        ["--control-plane-audit-enabled"],
        ["--jwt-issuer", "https://issuer"],
        ["--jwt-audience", "me"],
        ["--jwt-jwks-uri", "https://issuer/keys"],
        ["--jwt-role-mapping", "a=admin"],
        ["--tls-cert-path", "c.pem"],
        ["--tls-key-path", "k.pem"],
        ["--max-payload-size", "0"],
        ["--request-timeout-secs", "0"],
        ["--request-timeout-secs", "-5"],
        ["--health-check-interval-secs", "0"],
        ["--health-check-timeout-secs", "0"],
        ["--health-failure-threshold", "0"],
        ["--health-success-threshold", "0"],
        ["--service-discovery-port", "0"],
        ["--service-discovery-port", "65536"],
    ],
)
def test_unsupported_stock_flag_exits_2_with_one_error_line(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        make_balancer(parse(*LAPS, *flags))
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {flags[0]}: ")
    assert err.count("\n") == 1


def test_ignored_flags_are_listed_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    make_balancer(parse(*LAPS, "--policy", "round_robin", "--log-dir", "logs", "--dp-aware"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(": --dp-aware --log-dir --policy")


def test_discovery_flags_without_discovery_cause_warning(caplog: pytest.LogCaptureFixture) -> None:
    make_balancer(parse(*LAPS, "--prefill-selector", "a=b", "--service-discovery-port", "7"))
    (record,) = caplog.records
    assert record.getMessage().endswith(": --prefill-selector --service-discovery-port")


def test_laps_logs_nothing_if_allocation_is_off(caplog: pytest.LogCaptureFixture) -> None:
    make_balancer(parse(*TWO, "--service-discovery", "--queue-size", "7"))
    assert not [r for r in caplog.records if "laps" in r.name]


@contextlib.asynccontextmanager
async def served(s: Stack) -> AsyncIterator[str]:
    """Serve the stack's balancer as a launch would, and yield its host and port."""
    config = s.balancer.server_config()
    config.host, config.port = "127.0.0.1", 0
    async with serving(config) as port:
        yield f"127.0.0.1:{port}"


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a key and a self-signed certificate for 127.0.0.1 and return their paths."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_path, key_path


def test_router_serves_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)

    async def run() -> None:
        args = {"server_cert_path": str(cert), "server_key_path": str(key)}
        async with stack(2, args=args) as s, served(s) as at:
            trusted = ssl.create_default_context(cafile=str(cert))
            async with s.client.post(f"https://{at}/generate", json={"text": "a"}, ssl=trusted) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await s.client.get(f"http://{at}/health")

    asyncio.run(run())


def test_cors_headers_are_sent_only_to_allowed_origins() -> None:
    async def run() -> None:
        args = {"cors_allowed_origins": ["https://chat.example"]}
        async with stack(2, args=args) as s, served(s) as at:
            for origin, allowed in (("https://chat.example", True), ("https://other.example", False)):
                ask = {"Origin": origin, "Access-Control-Request-Method": "POST"}
                async with s.client.options(f"http://{at}/v1/chat/completions", headers=ask) as response:
                    assert (response.status == 200) == allowed
                async with s.client.post(
                    f"http://{at}/generate", json={"text": "a"}, headers={"Origin": origin}
                ) as response:
                    assert response.status == 200
                    assert ("access-control-allow-origin" in response.headers) == allowed

    asyncio.run(run())


@pytest.mark.parametrize(("config", "seconds"), [({}, 75.0), ({"keep_alive_s": 0.2}, 0.2)])
def test_keep_alive_defaults_to_75_s_and_is_configurable(config: dict[str, Any], seconds: float) -> None:
    async def run() -> None:
        async with stack(2, config=config) as s, served(s) as at:
            assert s.balancer.server_config().timeout_keep_alive == seconds
            host, port = at.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            if seconds < 1:
                assert await asyncio.wait_for(reader.read(), 120) == b""
            writer.close()

    asyncio.run(run())
