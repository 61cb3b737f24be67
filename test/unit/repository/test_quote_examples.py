"""Examples that use quotes: the autoscaler queries existing series, and the scorer uses the routes correctly."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import kubernetes_validate
import msgspec
import pytest
import yaml
from laps_core.latency.step import Coefficients
from laps_core.receipts.quote import QuoteState
from sglang_laps.http import quote_routes

EXAMPLES = Path(__file__).parents[3] / "examples"
SERIES = """
from prometheus_client import generate_latest
from sglang_laps.telemetry.status import Series
Series({"model_name": "m", "dp_rank": "0"})
print(generate_latest().decode())
"""

# -- the autoscaler


@pytest.fixture(scope="module")
def scaled() -> Any:
    return yaml.safe_load((EXAMPLES / "kubernetes/autoscaling/keda.yaml").read_text())


def test_autoscaler_targets_existing_deployment(scaled: Any) -> None:
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    deployments = [
        d for d in yaml.safe_load_all((EXAMPLES / "kubernetes/prefill.yaml").read_text()) if d["kind"] == "Deployment"
    ]
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] in [d["metadata"]["name"] for d in deployments]
    assert 1 <= spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]


def test_kubernetes_accepts_autoscaler_behavior(scaled: Any) -> None:
    """KEDA copies the behavior to a HorizontalPodAutoscaler, whose schema is Kubernetes' own."""
    spec = scaled["spec"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec["scaleTargetRef"]["name"]}
    metrics = [
        {
            "type": "External",
            "external": {
                "metric": {"name": t["name"]},
                "target": {"type": t["metricType"], "value": t["metadata"]["threshold"]},
            },
        }
        for t in spec["triggers"]
    ]
    autoscaler = {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "prefill"},
        "spec": {
            "scaleTargetRef": target, "maxReplicas": spec["maxReplicaCount"], "metrics": metrics,
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        },
    }  # fmt: skip
    kubernetes_validate.validate(autoscaler, kubernetes_validate.latest_version(), strict=True)


def test_autoscaler_queries_existing_series_and_prometheus(scaled: Any) -> None:
    text = subprocess.run([sys.executable, "-c", SERIES], capture_output=True, text=True, check=True).stdout
    services = [
        d["metadata"]["name"]
        for d in yaml.safe_load_all((EXAMPLES / "kubernetes/monitoring.yaml").read_text())
        if d["kind"] == "Service"
    ]
    classes = set()
    for trigger in scaled["spec"]["triggers"]:
        told = trigger["metadata"]
        assert trigger["type"] == "prometheus"
        (name,) = re.findall(r"sglang:laps_\w+", told["query"])
        assert f"# TYPE {name} gauge" in text
        classes |= set(re.findall(r'class="(\w+)"', told["query"]))
        assert float(told["threshold"]) > 0.0
        assert urlsplit(told["serverAddress"]).hostname in services
    assert classes == {"short", "long"}


# -- the scorer


def scorer() -> Any:
    spec = importlib.util.spec_from_file_location("scorer", EXAMPLES / "scorer/scorer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TIMEOUT_S = 60.0  # type: ignore[attr-defined]
    return module


@contextmanager
def run_busy_server(left_s: float | None) -> Iterator[str]:
    """Run a server whose device is busy for ``left_s`` seconds; with None it gives no quotes."""
    model = Coefficients(0.0, 1e-4, 0.0, 0.0, 0.01)
    state = left_s is not None and QuoteState(model=model, threshold=256, chunk=8192, short_batch=4096, left_s=left_s)
    status = {"quote": msgspec.to_builtins(state) if state else None}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            asked, rank, _ = quote_routes._read(dict(parse_qsl(urlsplit(self.path).query)), body)
            code, text = quote_routes.answer(status, asked, rank, 0.0, one=False)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_scorer_prefers_server_with_shortest_quote() -> None:
    with run_busy_server(0.0) as idle, run_busy_server(2.0) as busy, run_busy_server(None) as off:
        found = scorer().scores(10_000, {idle: 0, busy: 0, off: 0, "http://127.0.0.1:9": 0})
        assert found == {idle: 1.0, busy: pytest.approx(1.01 / 3.01, rel=0.01)}
        cached = scorer().scores(30_000, {idle: 0, busy: 29_990})
        assert cached[busy] == 1.0, "its cache is worth more than the wait"
        assert scorer().scores(10_000, {}) == {}


def test_scorer_command_prints_best_server_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_busy_server(0.0) as idle, run_busy_server(2.0) as busy:
        monkeypatch.setattr(sys, "argv", ["scorer.py", "10000", f"{busy}=0", idle])
        assert scorer().main() == 0
    assert capsys.readouterr().out.split()[:2] == ["1.000", idle]
