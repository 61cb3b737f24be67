"""Receipts of real servers: causes add up to the clients' waiting time and name the requests waited for. Servers:
prefill servers in both of SGLang's loops, servers that decode, and a server on an emulated device."""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from laps_core.receipts.receipt import META_KEY, RECEIPT_HEADER
from rounds import repeat_until
from served import CHUNK, LAPS, NORMAL, NORMAL_LOOP, OVERLAP, Prefill, Setup, random_prompt, request_body, run_on
from sglang_laps import compat

from .test_emulated import ON_LAPS as EMULATED

COLOCATED = [
    Setup(f"receipts-colocated-{name}", (*LAPS, *flags, "--laps-config", '{"slice_ms": 1.0}'), mode="null")
    for name, flags in (("normal", NORMAL_LOOP), ("overlap", ()))
]
COUNT = int(os.environ.get("LAPS_RECEIPT_REQUESTS", "80"))
"""Number of requests to each server."""

pytestmark = [pytest.mark.timeout(600), *run_on(NORMAL, OVERLAP, *COLOCATED, EMULATED)]


@dataclass
class RequestRecord:
    """One request as seen by its client."""

    rid: str
    ttft_ms: float
    receipt: dict[str, Any] | None
    left: dict[str, Any] | None = None
    """Receipt in the header, completed when the answer left the server."""

    @property
    def missed_ms(self) -> float:
        """Time in the server that its receipt in the body misses (milliseconds)."""
        assert self.receipt
        assert self.left
        return float(self.left["ttft_ms"]) - float(self.receipt["ttft_ms"])

    @property
    def way_ms(self) -> float:
        """Part of the TTFT outside the server (milliseconds)."""
        assert self.left
        return self.ttft_ms - float(self.left["ttft_ms"])


def make_body(prefill: Prefill, prompt: list[int], rid: str, new: int = 6) -> dict[str, Any]:
    """Return a body for ``/generate``; on a server that decodes it asks for a stream."""
    if prefill.setup.mode != "null":
        return request_body(random.Random(rid).getrandbits(60), prompt, rid)
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "rid": rid, "stream": True, "sampling_params": sampling}


def send_and_time(
    prefill: Prefill, connection: http.client.HTTPConnection, prompt: list[int], rid: str
) -> RequestRecord:
    """Send a request and time its first token, in a thread that waits for nothing else and thus notices it at once."""
    text = json.dumps(make_body(prefill, prompt, rid))
    begin = time.perf_counter()
    connection.request("POST", "/generate", text, {"Content-Type": "application/json", RECEIPT_HEADER: "1"})
    reply = connection.getresponse()
    first = reply.readline()
    ttft_s = time.perf_counter() - begin
    reply.read()
    receipt = json.loads(first.removeprefix(b"data: ")).get("meta_info", {}).get(META_KEY)
    left = None if receipt is None else json.loads(reply.headers[RECEIPT_HEADER])
    return RequestRecord(rid, 1e3 * ttft_s, receipt, left)


def connect(prefill: Prefill) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", int(prefill.server.url.rpartition(":")[2]), timeout=300)


def send_mixed(
    prefill: Prefill, name: str, count: int, *, clients: int = 4, aborts: bool = True
) -> list[RequestRecord]:
    """Send long and short prompts in a closed loop; some are aborted."""
    rng = random.Random(count)
    long = 8 * CHUNK if prefill.setup is EMULATED else 3 * CHUNK
    work = [random_prompt(7 * i, long + i if i % 9 == 0 else rng.randint(5, 250)) for i in range(count)]
    left = iter(enumerate(work))

    def client() -> list[RequestRecord]:
        connection, found = connect(prefill), list[RequestRecord]()
        for i, prompt in left:
            rid = f"{name}-{i}-x"
            aborting = threading.Timer(0.05 * rng.random(), prefill.post, ("/abort_request", {"rid": rid}))
            if aborts and i % 13 == 5:
                aborting.start()
            found.append(send_and_time(prefill, connection, prompt, rid))
            if aborting.ident is not None:
                aborting.join()
        return found

    with ThreadPoolExecutor(clients) as pool:
        return [s for done in [pool.submit(client) for _ in range(clients)] for s in done.result()]


def require_causes_add_up(receipt: dict[str, Any]) -> None:
    causes = receipt["causes"]
    assert abs(sum(causes.values()) - receipt["ttft_ms"]) < 0.01, receipt
    assert all(ms > 0.0 for ms in causes.values()), receipt
    assert causes.get("other", 0.0) <= 0.02 * receipt["ttft_ms"] or receipt["aborted"], receipt


class Loopback:
    """Context manager that pings the server to measure the time of the way there and back (milliseconds)."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill, self._end, self.took_ms = prefill, threading.Event(), list[float]()

    def _ping(self) -> None:
        connection = connect(self._prefill)
        while not self._end.wait(0.01):
            begin = time.perf_counter()
            connection.request("GET", "/ping")
            connection.getresponse().read()
            self.took_ms.append(1e3 * (time.perf_counter() - begin))

    def __enter__(self) -> Loopback:
        self._thread = threading.Thread(target=self._ping)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[max(0, round(share * len(values)) - 1)]


def test_receipt_causes_add_up_to_client_ttft(prefill: Prefill) -> None:
    """Agreement within a millisecond, except for the way to the server and back, and for waits for a core. Pings
    measure both at the same time."""
    name = f"sum-{prefill.setup.name}"
    told: list[RequestRecord] = []

    def attempt(i: int) -> bool:
        with Loopback(prefill) as loopback:
            found = send_mixed(prefill, f"{name}-{i}", COUNT)
        told[:] = [s for s in found if s.receipt is not None]
        assert len(told) >= 0.9 * COUNT
        for s in told:
            require_causes_add_up(s.receipt or {})
            require_causes_add_up(s.left or {})
            assert s.missed_ms >= 0.0, s
            assert s.way_ms > 0.0, s
        missed, way = [s.missed_ms for s in told], [s.way_ms for s in told]
        for share in (0.5, 0.9, 0.99):
            print(f"{name}: P{100 * share:g}: receipts miss {quantile(missed, share):.2f} ms in the server, "
                  f"{quantile(way, share):.2f} ms outside; a ping takes {quantile(loopback.took_ms, share):.2f}"
            )  # fmt: skip
        # A prompt is longer than a ping and waits for a core more often.
        ping_ms = quantile(loopback.took_ms, 0.5)
        outside_ms = quantile(way, 0.5) - 2.0 * ping_ms
        # A receipt misses the wait for a core as it is made. The slowest pings show how long such waits are here.
        rarely_ms = 1.0 + quantile(loopback.took_ms, 0.99)
        return (
            quantile(missed, 0.5) <= 1.0 + ping_ms
            and quantile(missed, 0.99) <= rarely_ms
            and outside_ms <= 2.0 + ping_ms
        )

    repeat_until(attempt, "the machine lets processes run as they become ready")
    kept = {r["rid"]: r for r in prefill.get("/laps_receipts?seconds=600")["receipts"]}
    # An aborted request has a receipt, too, although its answer has none.
    aborted = set() if compat.release().missing else {f"{name}-0-{i}-x" for i in range(COUNT)}
    assert aborted | {s.rid for s in told} <= kept.keys()
    for r in kept.values():
        require_causes_add_up(r)
    for s in told:
        assert kept[s.rid]["causes"] == (s.receipt or {})["causes"]
    total: defaultdict[str, float] = defaultdict(float)
    for r in kept.values():
        for cause, ms in r["causes"].items():
            total[cause] += ms
    assert total["other"] <= 0.02 * sum(total.values())
    assert {"computing", "tokenizing", "answering"} <= total.keys()


def test_receipt_names_long_prompt_that_delayed_request(prefill: Prefill) -> None:
    tokens = 8000 if prefill.setup is EMULATED else 6 * CHUNK

    def attempt(i: int) -> bool:
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(send_and_time, prefill, connect(prefill), random_prompt(500 + i, tokens), f"whale-{i}-x")
            time.sleep(0.05)
            minnow = send_and_time(prefill, connect(prefill), random_prompt(600 + i, 40), f"minnow-{i}-x")
            whale = long.result()
        assert whale.receipt
        assert minnow.receipt
        require_causes_add_up(whale.receipt)
        require_causes_add_up(minnow.receipt)
        behind = {other["rid"] for other in minnow.receipt["behind"]}
        return f"whale-{i}-x" in behind and bool({"behind_long", "gap"} & minnow.receipt["causes"].keys())

    repeat_until(attempt, "a short prompt waits behind a long one")


def test_receipts_are_filtered_by_rid_class_and_slowest(prefill: Prefill) -> None:
    send_mixed(prefill, f"find-{prefill.setup.name}", 30, aborts=False)
    slowest = prefill.get("/laps_receipts?slowest=3&class=long")["receipts"]
    assert [r["class"] for r in slowest] == ["long"] * 3
    assert slowest == sorted(slowest, key=lambda r: -r["ttft_ms"])
    (one,) = prefill.get(f"/laps_receipts?rid={slowest[0]['rid']}")["receipts"]
    assert one == slowest[0]
    assert prefill.get("/laps_receipts?rid=nobody")["receipts"] == []
    answer = prefill.get("/laps_receipts")
    assert 20 <= answer["kept"] <= 10_000
    assert len(answer["receipts"]) == 20


def test_timeline_has_one_device_lane_without_overlaps(prefill: Prefill) -> None:
    send_mixed(prefill, f"lane-{prefill.setup.name}", 30)
    trace = prefill.get("/laps_trace?seconds=60")
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["device", "long held back", "short held back"]
    device = [e for e in trace["traceEvents"] if e["ph"] == "X" and lanes[(e["pid"], e["tid"])] == "device"]
    assert any(not e["name"].startswith("idle") for e in device)
    ends: list[float] = []
    for e in device:
        assert e["dur"] >= 0
        while ends and ends[-1] <= e["ts"]:
            ends.pop()
        # An event lies inside the batch that it preempts, or after it.
        assert not ends or e["ts"] + e["dur"] <= ends[-1], e
        assert not ends or not e["name"].startswith("idle"), e
        ends.append(e["ts"] + e["dur"])
    ran = [e["args"] for e in device if "measured_ms" in e["args"]]
    assert all((a["measured_ms"] or 0.0) >= 2 * a["predicted_ms"] for a in ran if a["late"])
    spans = [e for e in trace["traceEvents"] if e["ph"] in "be"]
    assert len(spans) == 2 * sum(e["ph"] == "b" for e in spans)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_route_returns_receipt_header_on_request(prefill: Prefill, stream: bool) -> None:
    body: dict[str, Any] = {"model": "", "prompt": random_prompt(9, 30), "max_tokens": 3, "stream": stream}
    if prefill.setup.mode != "null":
        body |= {key: value for key, value in request_body(99 + stream, []).items() if key.startswith("bootstrap")}

    def header(**headers: str) -> str | None:
        connection = connect(prefill)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        reply.read()
        return reply.getheader(RECEIPT_HEADER)

    assert header() is None
    text = header(**{RECEIPT_HEADER: "1"})
    assert text is not None
    require_causes_add_up(json.loads(text))
    assert json.loads(text)["new_tokens"] + json.loads(text)["cached_tokens"] == 30
