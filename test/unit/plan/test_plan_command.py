"""The command laps-plan as called by a user."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from laps_core.histogram import LengthCount
from laps_core.protocol import STATUS_ROUTE, Status
from laps_plan.plan import command, words
from laps_plan.plan.command import main

MIX = "85% uniform:16-128, 15% log:1024-4096"


def test_mix_produces_table_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan"
    args = ["--mix", MIX, "--requests", "600", "--load", "0.6", "--servers", "2", "--out", str(out)]
    assert main(args) == 0
    told = capsys.readouterr()
    assert told.err == ""
    for said in ("Side by side", "Poisson", "shortest-prefill-first", "laps, pools", "emulated servers", "--chunked"):
        assert said in told.out
    page = (out / "index.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 3
    assert "src=" not in page
    assert "<?xml" not in page
    plan = json.loads((out / "plan.json").read_text())
    assert plan["traffic"]["load"] == pytest.approx(0.6, abs=0.1)
    assert {"fcfs", "hrrn", "shortest-prefill-first", "laps", "laps, pools"} <= {
        side["policy"] for side in plan["side_by_side"]
    }
    for side in plan["side_by_side"]:
        assert side["requests"] == 600
        assert 0.0 < side["short"]["p50"] <= side["short"]["p99"]
    assert {"chunk", "guard", "threshold", "pools"} <= {flag["flag"] for flag in plan["flags"]}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere.csv"], "nowhere.csv"),
        (["--mix", "90% lmsys"], "100%"),
        (["--mix", MIX, "--requests", "5"], "too few"),
        (["--from", "ftp://x"], "ftp://x"),
        (["--from", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--mix", MIX, "--profile", "nope"], "no profile nope"),
        (["--mix", MIX, "--profile", __file__.replace(".py", ".json")], "no profile"),
        (
            ["--mix", MIX, "--requests", "100", "--colocated", "--answers", "100% fixed:500000"],
            "one request needs 50",
        ),
        (["--mix", "100% fixed:3000000", "--requests", "100", "--profile", "h200-qwen3-32b"], "take too long"),
    ],
)
def test_unusable_input_is_rejected_in_one_line(
    args: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    assert main([*args, "--out", str(out)]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert len(told.err.splitlines()) == 1
    assert not told.out
    assert not out.exists()


def test_file_that_is_no_profile_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main(["--mix", MIX, "--profile", str(other), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"laps-plan: {other} is not a profile that laps-profile wrote\n"


def test_long_simulation_is_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "answer", stop)
    assert main(["--mix", "100% fixed:100000", "--requests", "1000", "--out", str(tmp_path)]) == 130
    assert "laps-plan: long prompts: this takes about" in capsys.readouterr().err
    assert main(["--mix", MIX, "--requests", "1000", "--out", str(tmp_path)]) == 130
    assert "takes about" not in capsys.readouterr().err


def test_error_names_broken_line_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_ms,new_tokens\n" + "1,5\n" * 99 + "x,5\n")
    assert main([str(path)]) == 2
    assert "trace.csv: line 101" in capsys.readouterr().err


def test_lengths_without_times_require_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("new_tokens\n" + "50\n" * 99)
    assert main([str(path)]) == 2
    assert "--rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("times", "args", "told"),
    [
        ([*range(99), 1e17], [], "years"),
        ([*range(99), 1e17], ["--colocated"], "years"),
        (range(100), ["--rate", "1e-12"], "years"),
        (range(100), ["--rate", "1e12"], "requests per second"),
        ([1e-9 * i for i in range(100)], [], "requests per second"),
    ],
)
def test_times_in_another_unit_are_refused(
    times: Sequence[float], args: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_ms,new_tokens\n" + "".join(f"{t},50\n" for t in times))
    assert main([str(path), *args, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "args", [[], ["a.csv", "--mix", MIX], ["--mix", MIX, "--rate", "0"], ["x", "--ttft-ms", "1,2,3"]]
)
def test_invalid_arguments_exit_with_code_2(args: list[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(args)
    assert e.value.code == 2


@contextmanager
def server(status: Status) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == f"/{STATUS_ROUTE}" else 404)
            self.end_headers()
            self.wfile.write(json.dumps({**status.as_dict(), "more": 1}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_missing_matplotlib_error_names_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert main(["--mix", "100% log:32-512"]) == 2
    assert capsys.readouterr().err == "laps-plan: matplotlib is missing: pip install 'sglang-laps[plan]'\n"


def test_plan_reads_lengths_from_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = LengthCount()
    for i in range(600):
        count.add(4000 if i % 20 == 0 else 60, 0)
    with server(Status(enabled=True, lengths=count.to_lengths(12.0))) as url:
        assert main(["--from", url, "--requests", "300", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "has counted 600" in told
    assert "Poisson" in told
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["traffic"]["rate_per_s"] == pytest.approx(50.0, rel=0.2)


def test_server_without_laps_reports_no_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server(Status(enabled=False)) as url:
        assert main(["--from", url, "--out", str(tmp_path / "x")]) == 2
    assert "reports no lengths" in capsys.readouterr().err


def test_plan_command_imports_no_server_or_router() -> None:
    theirs = {"sglang", "sglang_router", "torch", "aiohttp", "starlette", "uvicorn", "uvloop", "tokenizers"}
    code = f"import laps_plan.plan.command, sys; sys.exit(' '.join({theirs!r} & sys.modules.keys()) or 0)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert found.returncode == 0, found.stderr.decode()


def test_plan_accuracy_is_read_from_measurements(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.json"
    assert "Not compared" in words.accuracy(path)
    case = {"trace": "azure", "policy": "laps", "figure": "short P90", "planned_ms": 110.0, "measured_ms": 100.0}
    path.write_text(json.dumps({"what": "four servers", "cases": [case, {**case, "planned_ms": 95.0}]}))
    said = words.accuracy(path)
    assert "2 figures" in said
    assert "at most 10% (azure, laps, short P90)" in said


@pytest.mark.parametrize("name", ["matplotlib", "tabulate", "tqdm"])
def test_missing_package_gives_one_line_and_help_works(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; from laps_plan.plan.command import main; main(['--help'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert found.returncode == 0, found.stderr.decode()


def test_unwritable_page_is_rejected_before_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "index.html").mkdir()
    assert main(["--mix", MIX, "--requests", "100", "--out", str(tmp_path)]) == 2
    assert "index.html" in capsys.readouterr().err


def test_interrupt_ends_plan_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_prefill", interrupt)
    assert main(["--mix", MIX]) == 130
