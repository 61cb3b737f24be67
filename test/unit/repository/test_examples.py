"""Files of examples/: they parse, their flags are known, and their dashboards query existing metrics."""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import kubernetes_validate
import pytest
import yaml
from laps_core.config import LapsConfig
from prometheus_client.parser import text_string_to_metric_families
from sglang_laps import options
from sglang_router_laps.cli import LapsRouterArgs, make_balancer
from sglang_router_laps.http.status import Metrics

REPO = Path(__file__).parents[3]
EXAMPLES = REPO / "examples"
SERVER, ROUTER = "sglang.launch_server", "sglang_router_laps.launch_router"
MODEL = "/models/some-model"


class Unit(configparser.RawConfigParser):
    """A systemd unit. Raises configparser.Error if the file is invalid or repeats a setting."""

    def optionxform(self, optionstr: str) -> str:
        """Return the name unchanged: names are case-sensitive."""
        return optionstr

    def __init__(self, path: Path) -> None:
        super().__init__(delimiters=("=",), comment_prefixes=("#",))
        self.read_string(re.sub(r"\\\n\s*", " ", path.read_text()), str(path))


def units() -> list[Path]:
    return sorted((EXAMPLES / "systemd").glob("*.service"))


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def module_of(target: str) -> str:
    """Return the module that an image of the Dockerfile runs."""
    text = (EXAMPLES / "docker" / "Dockerfile").read_text()
    stage = re.search(rf" AS {target}\n(.*?)(?=\nFROM |\Z)", text, re.S)
    assert stage
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", stage.group(1), re.M)
    assert entry
    return str(json.loads(entry.group(1))[2])


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Yield (file, module, arguments) of every server that the examples and the README start."""
    for path in units():
        words = shlex.split(Unit(path)["Service"]["ExecStart"].replace("${MODEL_PATH}", MODEL))
        yield path.name, words[2], words[3:]
    (compose,) = documents(EXAMPLES / "docker" / "compose.yaml")
    for name, service in compose["services"].items():
        if "build" in service:
            yield f"compose {name}", module_of(service["build"]["target"]), service["command"]
    for path in sorted((EXAMPLES / "kubernetes").glob("*.yaml")):
        for document in documents(path):
            for container in containers(document):
                name, _, target = container["image"].partition(":")[0].partition("sglang-laps-")
                if name:
                    # Another project's image.
                    continue
                yield f"{path.name} {container['name']}", module_of(target), container["args"]
    for page in (REPO / "README.md", REPO / "docs" / "ROUTER.md", EXAMPLES / "README.md"):
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ *python -m (?:sglang\.launch_server|sglang_router\.launch_router) .*$", text, re.M):
            words = shlex.split(line)
            yield page.name, words[2].replace("sglang_router.", "sglang_router_laps."), words[3:]


def containers(document: dict[str, Any]) -> list[Any]:
    if document["kind"] not in ("StatefulSet", "Deployment"):
        return []
    found: list[Any] = document["spec"]["template"]["spec"]["containers"]
    return found


COMMANDS = list(commands())


def start_params(module: str) -> list[Any]:
    """Return the arguments of each start of this module, as parameters of a test."""
    return [pytest.param(words, id=where.replace(" ", "-")) for where, found, words in COMMANDS if found == module]


class Strict(argparse.ArgumentParser):
    """Parser that raises an error instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@pytest.fixture(scope="module")
def server_parser() -> argparse.ArgumentParser:
    """Return SGLang's argument parser with the LAPS group."""
    from sglang.srt.server_args import ServerArgs

    parser = Strict(conflict_handler="resolve", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    # Another test may have loaded the plugins: then the group exists already.
    options.add_flags(parser)
    return parser


@pytest.mark.parametrize("words", start_params(SERVER))
def test_server_examples_use_existing_flags(words: list[str], server_parser: argparse.ArgumentParser) -> None:
    args = server_parser.parse_args(words)
    assert args.disaggregation_mode in ("prefill", "decode")
    assert args.enable_laps_scheduler == (args.disaggregation_mode == "prefill")
    assert isinstance(options.from_args(args), LapsConfig)


def router_args(words: list[str]) -> Any:
    parser = Strict(allow_abbrev=False)
    LapsRouterArgs.add_cli_args(parser)
    return LapsRouterArgs.from_cli_args(parser.parse_args(words))


@pytest.mark.parametrize("words", start_params(ROUTER))
def test_router_examples_use_existing_flags(words: list[str]) -> None:
    args = router_args(words)
    assert args.laps is not None
    if args.service_discovery:
        assert [*args.prefill_urls, *args.decode_urls] == []
        return
    assert len(args.prefill_urls) >= 2
    assert all(port == 8998 for _, port in args.prefill_urls)
    assert args.decode_urls


def test_every_kind_of_example_is_covered() -> None:
    found = [(where.split()[0], module) for where, module, _ in COMMANDS]
    for where in ("compose", "README.md"):
        assert {module for place, module in found if place == where} == {SERVER, ROUTER}
    for kind in ("sglang-{}.service", "{}.yaml"):
        assert {kind.format(role) for role in ("prefill", "decode", "router")} <= {place for place, _ in found}


@pytest.mark.parametrize("path", units(), ids=lambda p: p.name)
def test_systemd_units_have_required_settings(path: Path) -> None:
    unit = Unit(path)
    assert set(unit) == {"DEFAULT", "Unit", "Service", "Install"}
    assert unit["Service"]["ExecStart"].startswith("/")
    assert unit["Service"]["RestartPreventExitStatus"] == "2"


@pytest.mark.parametrize(
    "path", sorted([*EXAMPLES.rglob("*.y*ml"), *(REPO / ".github").rglob("*.yml")]), ids=lambda p: p.name
)
def test_yaml_parses_to_objects(path: Path) -> None:
    found = documents(path)
    assert found
    assert all(isinstance(document, dict) for document in found)


def manifests() -> list[Any]:
    """Return all manifests that are applied to a cluster."""
    (kustomization,) = documents(EXAMPLES / "kubernetes" / "kustomization.yaml")
    return [d for name in kustomization["resources"] for d in documents(EXAMPLES / "kubernetes" / name)]


@pytest.mark.parametrize("document", manifests(), ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_kubernetes_accepts_manifests(document: Any) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_kustomization_lists_every_manifest() -> None:
    (kustomization,) = documents(EXAMPLES / "kubernetes" / "kustomization.yaml")
    there = {path.name for path in (EXAMPLES / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == there


def deployments() -> dict[str, Any]:
    return {d["metadata"]["name"]: d["spec"] for d in manifests() if d["kind"] == "Deployment"}


def test_kubernetes_router_selectors_match_server_pods() -> None:
    ((_, _, words),) = [c for c in COMMANDS if c[0] == "router.yaml router"]
    args = router_args(words)
    (kustomization,) = documents(EXAMPLES / "kubernetes" / "kustomization.yaml")
    assert args.service_discovery_namespace == kustomization["namespace"]
    for role, selector in (("prefill", args.prefill_selector), ("decode", args.decode_selector)):
        pod = deployments()[role]["template"]
        assert selector
        assert selector.items() <= pod["metadata"]["labels"].items()
        ports = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
        assert ports["http"] == args.service_discovery_port
        bootstrap = pod["metadata"]["annotations"].get(args.bootstrap_port_annotation)
        assert bootstrap == (str(ports["bootstrap"]) if role == "prefill" else None)
    rules = {d["metadata"]["name"]: d["rules"] for d in manifests() if d["kind"] == "Role"}
    account = deployments()["router"]["template"]["spec"]["serviceAccountName"]
    assert rules[account] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


PROBES = {"router": ("/liveness", "/readiness", "/liveness")}
"""Deployment -> paths of the startup, readiness and liveness probes, if these are not /health."""


def test_kubernetes_probes_and_scrapes_use_container_ports() -> None:
    checked = []
    for name, spec in deployments().items():
        for container in spec["template"]["spec"]["containers"]:
            if not container["image"].startswith("sglang-laps-"):
                continue
            checked.append(name)
            ports = {p["name"]: p["containerPort"] for p in container["ports"]}
            arguments = [a for a in container["args"] if a.startswith("--port=")]
            assert arguments == [f"--port={ports['http']}"]
            probes = ("startupProbe", "readinessProbe", "livenessProbe")
            for probe, path in zip(probes, PROBES.get(name, ("/health",) * 3), strict=True):
                assert container[probe]["httpGet"] == {"path": path, "port": "http"}
            notes = spec["template"]["metadata"]["annotations"]
            assert notes["prometheus.io/port"] == str(ports["http"])
            assert notes["prometheus.io/path"] == "/metrics"
    assert sorted(checked) == ["decode", "prefill", "router"]


# -- dashboards

SERVER_METRICS = """
from prometheus_client import generate_latest
from sglang_laps.core import Totals
from sglang_laps.telemetry.status import Series
series = Series({"model_name": "m", "dp_rank": "0"})
zeros = {"fairness": {"credit_s": 0}, "in_progress": 0, "threshold": {"tokens": 1}, "load": {"busy_share": 0}}
series.update(0.0, lambda: {"queues": {}, **zeros}, {"short": Totals()})
print(generate_latest().decode())
"""


def server_metrics() -> str:
    """Return a server's metrics, made in a new process because their registry is global."""
    done = subprocess.run([sys.executable, "-c", SERVER_METRICS], capture_output=True, text=True, check=True)
    return done.stdout


def router_metrics() -> str:
    (words,) = [words for where, _, words in COMMANDS if where == "sglang-router.service"]
    plain = [w for w in words if w not in ("--laps-tokenizer", MODEL)]
    balancer: Any = make_balancer(router_args(plain))
    return str(Metrics(balancer.router).text().decode())


def dashboards() -> list[Path]:
    return sorted((EXAMPLES / "monitoring").rglob("*.json"))


@pytest.mark.parametrize(("name", "prefix"), [("laps-router", "laps_router_"), ("laps-prefill", "sglang:laps_")])
def test_dashboards_query_existing_metrics(name: str, prefix: str) -> None:
    text = router_metrics() if prefix == "laps_router_" else server_metrics()
    told = set()
    for family in text_string_to_metric_families(text):
        # A counter without samples appears only as its family's name.
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
            "summary": ("_sum", "_count"),
        }.get(family.type, ("",))
        told |= {family.name + suffix for suffix in suffixes}
    (path,) = [path for path in dashboards() if path.stem == name]
    panels = json.loads(path.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {metric for expr in expressions for metric in re.findall(rf"\b{re.escape(prefix)}\w+", expr)}
    assert all(prefix in expr for expr in expressions)
    assert asked <= told
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_each_dashboard_is_checked() -> None:
    assert [path.stem for path in dashboards()] == ["laps-prefill", "laps-router"]


def test_prometheus_scrapes_services_built_by_compose() -> None:
    (compose,) = documents(EXAMPLES / "docker" / "compose.yaml")
    (config,) = documents(EXAMPLES / "monitoring" / "prometheus.yml")
    targets = {t for job in config["scrape_configs"] for static in job["static_configs"] for t in static["targets"]}
    built = {name for name, service in compose["services"].items() if "build" in service}
    assert {t.split(":")[0] for t in targets} == built
