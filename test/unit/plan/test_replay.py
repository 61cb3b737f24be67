"""Replays of the simulator's own recordings, under the recorded policy and under another policy."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from laps_core.config import LapsConfig
from laps_core.latency.step import Coefficients
from laps_core.length import CLASSES, LONG, SHORT, classify
from laps_core.receipts.quote import QuoteState
from laps_core.receipts.receipt import Receipt, Receipts
from laps_plan.plan.command import main
from laps_plan.profile import Profile
from laps_plan.replay.replay import HERE, Policy, config_of, policies, quantiles, replay
from laps_plan.replay.source import fetch, of_receipts
from laps_plan.sim.variants import run
from laps_plan.traffic import files, recording
from laps_plan.traffic.recording import Head, Recorded, Recording
from laps_plan.traffic.streams import Open
from simulated import CHUNK, HOST_PROFILE, MIX

GPU = Profile.load("h200-qwen3-8b")


def record_server(variant: str, profile: Profile, rate: float, *, seed: int = 3, requests: int = 2000) -> Recording:
    """Return the recording of a server with this policy."""
    record = run(variant, Open(MIX, rate, requests, seed=seed), profile, chunk=CHUNK).record
    rows = sorted(zip(record.at, record.new, record.cached, record.ttft, strict=True))
    mean = sum(profile.spread) / len(profile.spread) if profile.spread else 1.0
    host: Any = {"after_ms": 1e3 * profile.reply_s, "host_ms": 1e3 * profile.step_host_s}
    found = [
        Recorded(
            arrival_ms=1e3 * at, new_tokens=new, cached_tokens=cached, cls=classify(new, 256), ttft_ms=1e3 * ttft,
            before_ms=1e3 * (profile.front_s + profile.front_token_s * (new + cached)), **host,
        )
        for at, new, cached, ttft in rows
    ]  # fmt: skip
    head = Head(
        model=profile.stretched(mean).coefficients, config=LapsConfig().as_dict(), chunk=CHUNK, layers=profile.layers,
        launch_s=profile.slices_launch_s,
    )  # fmt: skip
    return Recording(head, found)


CASES = {"host": (HOST_PROFILE, 12.0), "gpu": (GPU, 40.0)}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("made", "policy"), [("laps", HERE), ("fcfs", "fcfs")])
def test_replay_under_own_policy_reproduces_recording(case: str, made: str, policy: str) -> None:
    found = record_server(made, *CASES[case])
    (one,) = replay(found, [p for p in policies(LapsConfig()) if p.name == policy])
    _require_similar(quantiles(found, one.ttft_ms), quantiles(found, [r.ttft_ms for r in found.requests]), 0.10)


@pytest.mark.parametrize("case", list(CASES))
def test_fcfs_replay_of_laps_recording_matches_fcfs(case: str) -> None:
    under_laps, under_fcfs = (record_server(name, *CASES[case]) for name in ("laps", "fcfs"))
    (one,) = replay(under_laps, [Policy("fcfs", "fcfs")])
    _require_similar(
        quantiles(under_laps, one.ttft_ms), quantiles(under_fcfs, [r.ttft_ms for r in under_fcfs.requests]), 0.15
    )


def _require_similar(found: Any, wanted: Any, within: float) -> None:
    for cls in CLASSES:
        for q in ("p50", "p90"):
            assert found[cls][q] == pytest.approx(wanted[cls][q], rel=within), (cls, q)


def test_replay_policies_change_one_knob_at_a_time() -> None:
    config = LapsConfig(guard=0.3, wait_window_ms=0.0)
    own = config.as_dict()
    found = policies(config)
    assert [p.name for p in found[:4]] == ["fcfs", "hrrn", "shortest-prefill-first", HERE]
    for policy in found[4:]:
        assert sum(policy.knobs[k] != own[k] for k in policy.knobs) == 1, policy.name
    assert len({p.name for p in found}) == len(found)


def test_each_dp_rank_is_replayed_as_separate_server() -> None:
    one = record_server("laps", *CASES["host"], requests=200)
    twice = [msgspec.structs.replace(r, rank=rank) for r in one.requests for rank in (0, 1)]
    alone, both = (replay(rec, [Policy("fcfs", "fcfs")])[0] for rec in (one, Recording(one.head, twice)))
    assert both.ttft_ms[::2].tolist() == pytest.approx(alone.ttft_ms.tolist())


def test_replay_keeps_times_independent_of_policy() -> None:
    rows = [
        Recorded(
            arrival_ms=1000.0 * i, new_tokens=100, cls=SHORT, ttft_ms=50.0, before_ms=20.0, after_ms=30.0, host_ms=0.0
        )
        for i in range(12)
    ]
    head = Head(model=Coefficients(0.0, 0.0, 0.0, 0.0, 0.01), chunk=CHUNK)
    (one,) = replay(Recording(head, rows), [Policy("fcfs", "fcfs")])
    assert one.ttft_ms.tolist() == pytest.approx([60.0] * 12, abs=0.2)


# -- files


def test_recording_round_trips_and_reads_as_trace(tmp_path: Path) -> None:
    found, path = record_server("laps", *CASES["host"], requests=80), tmp_path / "rec.jsonl"
    found.save(path)
    known = recording.read(path)
    assert known.requests == found.requests
    assert (known.head.model, known.head.chunk) == (found.head.model, found.head.chunk)
    assert config_of(known) == config_of(found) == LapsConfig()
    traffic = files.read(path)
    assert [job.new for job in traffic.jobs] == [r.new_tokens for r in found.requests]
    assert traffic.timed
    assert "text" not in path.read_text()


@pytest.mark.parametrize("text", ["", "{}\n", '{"kind": "other"}\n', "{\n"])
def test_invalid_recording_is_rejected_in_one_line(tmp_path: Path, text: str, capsys: Any) -> None:
    path = tmp_path / "rec.jsonl"
    path.write_text(text)
    assert main(["--replay", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "rec.jsonl" in said


def test_too_few_requests_and_invalid_knobs_are_rejected() -> None:
    found = record_server("laps", *CASES["host"], requests=80)
    with pytest.raises(ValueError, match="at least 10"):
        replay(Recording(found.head, found.requests[:9]))
    for config in ({"guard": "much"}, {"gard": 0.1}):
        with pytest.raises(ValueError, match="knobs of the recording"):
            config_of(Recording(msgspec.structs.replace(found.head, config=config), []))


# -- a server

STATE = QuoteState(model=HOST_PROFILE.coefficients, threshold=256, chunk=CHUNK, short_batch=CHUNK, layers=28)
STATUS = {
    "enabled": True, "config": LapsConfig().as_dict(), "quote": msgspec.to_builtins(STATE), "overlap": False,
    "slices": {"launch_ms": 2.0}, "group": {"on": False},
}  # fmt: skip


def receipts() -> Receipts:
    rows = record_server("laps", *CASES["host"], requests=150).requests
    causes: Any = {"tokenizing": 1.0, "computing": 1.0, "scheduling": 0.5, "transfer": 2.0}
    found = [
        Receipt(
            rid=str(i), cls=r.cls, arrived_s=1.7e9 + r.arrival_ms / 1e3, new_tokens=r.new_tokens, cached_tokens=0,
            ttft_ms=r.ttft_ms + 3.0, causes=causes, aborted=i == 7,
        )
        for i, r in enumerate(rows)
    ]  # fmt: skip
    return Receipts(receipts=found[::-1], kept=150)


class FakeServer(BaseHTTPRequestHandler):
    said: dict[str, Any]

    def do_GET(self) -> None:
        body = self.said.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write(msgspec.json.encode(body))

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    FakeServer.said = {
        "/laps_status": STATUS,
        "/laps_receipts?seconds=60": receipts(),
        "/laps_receipts?seconds=30": Receipts(receipts=[]),
    }
    with HTTPServer(("127.0.0.1", 0), FakeServer) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_fetch_reads_receipts_and_model_from_server(server: str) -> None:
    found = fetch(server + "/", 60)
    assert (found.head.model, found.head.chunk, found.head.layers) == (HOST_PROFILE.coefficients, CHUNK, 28)
    assert len(found.requests) == 149, "but the aborted one"
    assert found.requests[0].arrival_ms == 0.0
    assert {(r.before_ms, r.after_ms, r.host_ms) for r in found.requests} == {(1.0, 2.0, 0.5)}
    assert of_receipts([]) == []


def test_server_that_decodes_is_not_replayed(server: str, capsys: Any) -> None:
    FakeServer.said["/laps_status"] = {**STATUS, "decode": {"streams": 0}}
    assert main(["--replay", server]) == 2
    assert capsys.readouterr().err.endswith("this server decodes, too; only prefill servers are replayed\n")


def test_reader_may_close_pipe(server: str) -> None:
    command = f"import sys; from laps_plan.plan.command import main; sys.exit(main(['--replay', '{server}']))"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_command_prints_tables_or_json_and_saves_recording(server: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rec.jsonl"
    assert main(["--replay", server, "--record", str(path)]) == 0
    said = capsys.readouterr().out
    for row in ("measured", "fcfs", HERE, "guard 0", "The slowest"):
        assert row in said
    assert main(["--replay", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["requests"]) == 149
    names = [p["name"] for p in told["policies"]]
    assert names[:2] == ["measured", "fcfs"]
    assert set(told["requests"][0]["ttft_ms"]) == set(names)
    assert {p["classes"][LONG]["requests"] for p in told["policies"]} == {
        sum(r["class"] == LONG for r in told["requests"])
    }


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"enabled": False}, "LAPS is off"), ({"group": {"on": True}}, "plan their steps together"),
        ({"quote": None}, "not fitted"),
    ],
)  # fmt: skip
def test_replay_error_gives_reason_of_unsuitable_server(
    server: str, change: dict[str, Any], why: str, capsys: Any
) -> None:
    FakeServer.said["/laps_status"] = {**STATUS, **change}
    assert main(["--replay", server]) == 2
    assert why in capsys.readouterr().err


def test_replay_fails_without_receipts_or_server(server: str, capsys: Any) -> None:
    assert main(["--replay", server, "--seconds", "30"]) == 2
    assert main(["--replay", server, "--seconds", "5"]) == 2
    assert main(["--replay", "http://127.0.0.1:9"]) == 2
    assert main(["--replay", "ftp://somewhere"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert "404" in said[1]
