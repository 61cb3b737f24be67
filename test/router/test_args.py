"""Flags of the router: the resulting settings, and errors in one line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from typing import Any

import pytest
from laps_core.pools.config import AllocConfig
from sglang_router.mini_lb import MiniLoadBalancer
from sglang_router.router_args import RouterArgs
from sglang_router_laps import stock_flags
from sglang_router_laps.balancer import LapsBalancer
from sglang_router_laps.cli import LapsRouterArgs, make_balancer
from sglang_router_laps.servers.discovery.names import Name

PD = ["--pd-disaggregation", "--mini-lb", "--decode", "http://127.0.0.1:9"]
TWO = [*PD, "--prefill", "http://127.0.0.1:1", "8998", "--prefill", "http://127.0.0.1:2", "8998"]


def parse(*flags: str, prefix: bool = False) -> Any:
    parser = argparse.ArgumentParser()
    LapsRouterArgs.add_cli_args(parser, use_router_prefix=prefix)
    return LapsRouterArgs.from_cli_args(parser.parse_args(list(flags)), use_router_prefix=prefix)


def test_laps_flag_off_keeps_stock_balancer_and_fields() -> None:
    args = parse(*TWO)
    assert args.laps is None
    assert "laps" not in vars(args)
    stock = RouterArgs.from_cli_args(argparse.Namespace(**{**vars(args), "prefill": None, "decode": None}))
    assert vars(stock).keys() == vars(args).keys()
    assert type(make_balancer(args)) is MiniLoadBalancer


def test_laps_flags_select_laps_balancer_and_set_config() -> None:
    args = parse(*TWO, "--enable-laps-alloc", "--laps-alloc-threshold", "300", "--laps-rebalance-ratio", "1.5")
    assert (args.laps.threshold, args.laps.ratio, args.laps.interval_s) == (300, 1.5, 5.0)
    assert isinstance(make_balancer(args), LapsBalancer)


def test_flags_with_router_prefix_are_parsed() -> None:
    two = [f.replace("--", "--router-") for f in TWO]
    args = parse(*two, "--router-enable-laps-alloc", "--router-laps-alloc-threshold", "9", prefix=True)
    assert args.laps.threshold == 9


def test_router_args_instance_is_returned_unchanged() -> None:
    args = RouterArgs(mini_lb=True, pd_disaggregation=True, prefill_urls=[("http://a", None)], decode_urls=["http://b"])
    assert LapsRouterArgs.from_cli_args(args) is args
    assert isinstance(args, RouterArgs)


def test_single_prefill_server_is_assigned_to_both_pools() -> None:
    balancer = make_balancer(parse(*PD, "--prefill", "http://127.0.0.1:1", "--enable-laps-alloc"))
    assert isinstance(balancer, LapsBalancer)
    assert [i.pool for i in balancer.router.pools.instances] == ["both"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--laps-alloc-threshold", "0"], "--laps-alloc-threshold: 0 is not a whole number >= 1"),
        (["--laps-alloc-threshold", "many"], "--laps-alloc-threshold: many is not a whole number"),
        (["--laps-rebalance-interval-s", "0"], "--laps-rebalance-interval-s: 0 is not a number >= 0.1"),
        (["--laps-rebalance-interval-s", "0.09"], "--laps-rebalance-interval-s: 0.09 is not a number >= 0.1"),
        (["--laps-rebalance-ratio", "1"], "--laps-rebalance-ratio: 1 is not a number > 1"),
        (["--laps-alloc-config", "{"], "--laps-alloc-config: not JSON"),
        (["--laps-alloc-config", "[]"], "--laps-alloc-config: not a JSON object"),
        (["--laps-alloc-config", '{"nmin": 1}'], "--laps-alloc-config: unknown key 'nmin'; known: initial_short"),
        (["--laps-alloc-config", '{"n_min": 0}'], "--laps-alloc-config: n_min: 0 is not a whole number >= 1"),
        (["--laps-alloc-config", '{"n_min": 1.5}'], "--laps-alloc-config: n_min: 1.5 is not a whole number >= 1"),
        (["--laps-alloc-config", '{"load_unit": true}'], "--laps-alloc-config: load_unit: true is not a whole number"),
        (["--laps-alloc-config", '{"initial_short": 0}'], "--laps-alloc-config: initial_short: 0 is not a whole"),
        (["--laps-alloc-config", '{"keep_alive_s": 0}'], "--laps-alloc-config: keep_alive_s: 0 is not a number > 0"),
        (["--laps-alloc-config", '{"interval_s": "1"}'], '--laps-rebalance-interval-s: "1" is not a number >= 0.1'),
        (["--laps-alloc-config", '{"ratio": NaN}'], "--laps-rebalance-ratio: NaN is not a number > 1"),
        (["--laps-alloc-config", '{"ratio": Infinity}'], "--laps-rebalance-ratio: Infinity is not a number > 1"),
        (["--laps-alloc-config", '{"tokenizer": ""}'], '--laps-tokenizer: "" is not a path'),
        (
            ["--laps-alloc-config", '{"spill": "x"}'],
            '--laps-alloc-config: spill: "x" is not one of auto, off, short, both',
        ),
        (["--laps-alloc-config", '{"n_min": 2}'], "--laps-alloc-config: n_min: 2 for each pool needs 4 --prefill"),
        (["--laps-alloc-config", '{"initial_short": 2}'], "--laps-alloc-config: initial_short: 2 must be from 1 to 1"),
        (
            ["--laps-rebalance-ratio", "3", "--laps-alloc-config", '{"ratio": 2}'],
            "--laps-alloc-config: ratio is also set by --laps-rebalance-ratio",
        ),
        (["--laps-tokenizer", "no/such/file"], "--laps-tokenizer: no/such/file: no tokenizer could be read"),
        (["--prefill", "http://127.0.0.1:1"], "http://127.0.0.1:1 is given twice"),
        (["--prefill", "dns://p:1", "--decode", "dns://p:1"], "dns://p:1 is given twice"),
        (["--prefill", "127.0.0.1:3"], "--prefill: '127.0.0.1:3' is not the URL of a server, like http://"),
        (["--prefill", "http://127.0.0.1:port"], "--prefill: 'http://127.0.0.1:port' is not the URL of a server"),
        (["--prefill", "http://127.0.0.1:99999"], "--prefill: 'http://127.0.0.1:99999' is not the URL of a server"),
        (["--decode", "http:///x"], "--decode: 'http:///x' is not the URL of a server"),
        (["--decode", "grpc://127.0.0.1:5"], "--decode: 'grpc://127.0.0.1:5' is not the URL of a server"),
        (["--decode", "http://[::1:5"], "--decode: 'http://[::1:5' is not the URL of a server"),
        (["--decode", "dns://decode"], "--decode: 'dns://decode' is not the name of several servers, like dns://"),
        (["--prefill", "dns://p:1/x"], "--prefill: 'dns://p:1/x' is not the name of several servers, like dns://"),
        (["--decode", ""], "--decode: '' is not the URL of a server"),
        (["--decode", "http://a..b:80"], "--decode: 'http://a..b:80' is not the URL of a server"),
        (["--decode", "http://xn--:80"], "--decode: 'http://xn--:80' is not the URL of a server"),
        (["--decode", "http://" + "a" * 64], "--decode: 'http://aaa"),
        (["--decode", "http://u:p@h"], "--decode: 'http://u:p@h' is not the URL of a server"),
        (["--decode", "dns://a..b:80"], "--decode: 'dns://a..b:80' is not the name of several servers"),
        (["--prefill", "http://h", "abc"], "--prefill: Invalid bootstrap port: abc"),
        (["--port", "99999"], "--port: 99999 is not a port"),
        (["--queue-size", "-5"], "--queue-size: -5 is not a number >= 0"),
        (["--decode", "http://h", "--decode", "HTTP://H:80/"], "http://h is given twice"),
        (["--port", "80", "--decode", "http://localhost/"], "--decode: 'http://localhost/' is this router itself"),
    ],
)
def test_invalid_flag_value_exits_2_with_one_error_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        make_balancer(parse(*TWO, "--enable-laps-alloc", *flags))
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"error: {says}")


@pytest.mark.parametrize(
    ("host", "url", "own"),
    [
        ("10.0.0.1", "http://10.0.0.1:5", True),
        ("::", "http://[::1]:5/", True),
        ("0.0.0.0", "http://127.0.0.1:6", False),
        ("10.0.0.1", "http://127.0.0.1:5", False),
        ("127.0.0.1", "http://10.0.0.1:5", False),
    ],
)
def test_own_url_is_known_by_address_and_port(host: str, url: str, own: bool) -> None:
    assert stock_flags.is_own(url, RouterArgs(host=host, port=5)) == own


DISCOVERY = ["--pd-disaggregation", "--mini-lb", "--enable-laps-alloc", "--service-discovery"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--enable-laps-alloc: needs at least one --prefill or --prefill-selector"),
        (["--prefill-selector", "a=b"], "--enable-laps-alloc: needs at least one --decode or --decode-selector"),
        (
            ["--prefill-selector", "a=b", "--decode-selector", "a=c"],
            "--service-discovery: needs pip install 'sglang-laps[kubernetes]': ",
        ),
    ],
)
def test_discovery_requires_selectors_and_kubernetes_package(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    monkeypatch.delitem(sys.modules, "sglang_router_laps.servers.discovery.pods", raising=False)
    with pytest.raises(SystemExit) as e:
        make_balancer(parse(*DISCOVERY, *flags))
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"error: {says}")


def test_dns_url_becomes_name_source_without_instances() -> None:
    args = parse(*PD, "--prefill", "dns://prefill.test:30000", "8998", "--enable-laps-alloc")
    lb = make_balancer(args)
    assert isinstance(lb, LapsBalancer)
    assert lb.router.pools.instances == []
    assert lb.router.members.sources == [Name("prefill", "dns://prefill.test:30000", 8998)]


def test_laps_alloc_requires_mini_lb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        parse("--enable-laps-alloc")
    assert e.value.code == 2
    assert capsys.readouterr().err == "error: --enable-laps-alloc: needs --mini-lb\n"


def test_alloc_config_is_json_serializable() -> None:
    args = parse(*TWO, "--enable-laps-alloc")
    assert json.loads(json.dumps(asdict(args.laps)))["interval_s"] == 5.0


def test_alloc_config_has_at_most_11_fields() -> None:
    assert len(fields(AllocConfig)) <= 10 + 1
