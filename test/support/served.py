"""Real prefill servers for the tests, requests to these servers, and the right answers."""

from __future__ import annotations

import asyncio
import copy
import fcntl
import hashlib
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import architectures
import http_load as load
import lean
import pytest
from rounds import ROUNDS

from benchmark.load.prompts import without_decode_server
from benchmark.rig import model, servers

CHUNK = 512
LAPS = ("--enable-laps-scheduler",)
NORMAL_LOOP = ("--disable-overlap-schedule",)
FAST_HEALTH_CHECK = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
"""Make a server report that it is ready right after its own warmup request. Otherwise its health route would
wait a second for another token."""
FLOAT32_STATES = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""Keep the convolution states of linear attention in float32 like everything else; the default is bfloat16."""
SHORT_HEARTBEAT = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"}
"""Let a decode server notice within 4 s (default: 10 s) that a prefill server is dead. Until then it busy-waits."""
HICACHE = Path(__file__).with_name("hicache")
"""Plugin with which HiCache copies between device and host without a GPU."""
FOLDER = "FOLDER"
"""Placeholder in a server's arguments for the server's own folder."""
SHAPE = model.Shape()
SEVERAL_SERVERS = "several"
"""Group of tests that need more than one server at a time; memory does not suffice for two such tests at once."""


@dataclass(frozen=True)
class Setup:
    """Start parameters of a prefill server. Tests with equal setups share one server."""

    name: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, hash=False)
    shape: model.Shape | str = SHAPE
    """Shape of the Qwen2 model, or a name in ``architectures.NAMES``."""
    extra_args: Callable[[Path], Sequence[str]] | None = None
    """Function that returns further arguments for a checkpoint's folder, such as paths of adapters made beside it."""
    mode: str = "prefill"
    """Mode argument of ``servers.sglang``."""
    group: str | None = None
    """Group of setups whose tests run in one process, one setup after another, and share the ``SharedServers``."""


STOCK = Setup("stock", NORMAL_LOOP, group=SEVERAL_SERVERS)
NORMAL = Setup("normal", (*LAPS, *NORMAL_LOOP), group=SEVERAL_SERVERS)
OVERLAP = Setup("overlap", LAPS, group=SEVERAL_SERVERS)
NO_PREFIX_CACHE = Setup(
    "no-prefix-cache",
    (
        *(*LAPS, "--disable-radix-cache", "--laps-wait-window-ms", "0", "--laps-config", '{"receipts": false}'),
        *("--dtype", "bfloat16", "--extra-metric-labels", '{"zone": "z1"}', "--enable-custom-logit-processor"),
    ),
)
"""Server without a prefix cache, window or receipts, with a label of its own on each metric, and logit processors."""
SAVED_MODEL = "model.json"
SLOW_WINDOW = Setup(
    "slow-window",
    (
        *(*LAPS, "--page-size", "64", "--chunked-prefill-size", "192", "--laps-wait-window-ms", "2000"),
        *("--laps-config", json.dumps({"profile": f"{FOLDER}/{SAVED_MODEL}"})),
    ),
)
"""Server with a window of 2 s and pages of 64 tokens, which saves its latency model."""


def run_on(*setups: Setup) -> list[pytest.MarkDecorator]:
    """Return marks of a test (or a ``pytestmark``) that runs on each of these servers and must leave them unharmed."""
    ids = [f"{s.name}@{s.group}" if s.group else f"@{s.name}" for s in setups]
    each = pytest.mark.parametrize("prefill", setups, indirect=True, ids=ids, scope="session")
    return [each, pytest.mark.usefixtures("clean")]


def make_checkpoint(shape: model.Shape | str = SHAPE) -> Path:
    """Return the folder of the small model of this shape. A lock makes sure that only one process makes the model."""
    folder = Path(os.environ.get("LAPS_MODELS", model.REPO / "out" / "models"))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".tests").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return architectures.make(folder, shape) if isinstance(shape, str) else model.make(folder, shape)


def prefill_server(setup: Setup, folder: Path, name: str = "prefill server") -> servers.Server:
    """Return a prefill server that is not started. Its log is in ``folder``."""
    args = ["--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "49152", "--enable-metrics"]
    args += ["--enable-cache-report", *(a.replace(FOLDER, str(folder)) for a in setup.args)]
    checkpoint = make_checkpoint(setup.shape)
    args += setup.extra_args(checkpoint) if setup.extra_args else ()
    env = {**FAST_HEALTH_CHECK, **FLOAT32_STATES, **servers.KEEP_MEMORY, **setup.env}
    return servers.sglang(setup.mode, checkpoint, folder / "server.log", *args, env=env, name=name)


@contextmanager
def run_prefill_server(setup: Setup, folder: Path) -> Iterator[Prefill]:
    """Run a prefill server."""
    server = prefill_server(setup, folder)
    try:
        yield Prefill(setup, server.start().ready())
    finally:
        server.kill()  # after SIGTERM the server would first look for work for 5 s


class Prefill:
    """A running prefill server, with the requests and checks of the tests."""

    def __init__(self, setup: Setup, server: servers.Server) -> None:
        self.setup, self.server = setup, server
        self.folder = server.log.parent
        self.laps = LAPS[0] in server.command

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.server.url + path, timeout=180) as reply:
            text = reply.read().decode()
        return json.loads(text) if text[:1] in ("{", "[") else text

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        return self.post_text(path, json.dumps(body or {}))

    def post_text(self, path: str, text: str) -> tuple[int, str]:
        request = urllib.request.Request(self.server.url + path, text.encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()

    def totals(self) -> dict[str, Any]:
        return dict(self.get("/laps_status")["totals"])

    def used_tokens(self) -> int:
        """Return the KV tokens held by requests or the prefix cache, over all ranks."""
        return sum(load["num_used_tokens"] for load in self.get("/v1/loads?include=core")["loads"])

    def require_all_tokens_free(self, timeout_s: float = 180.0) -> None:
        """Wait until nothing waits or runs, drop the prefix cache, and require every KV token to be free."""
        end, loads = time.monotonic() + timeout_s, None
        while time.monotonic() < end:  # the server refuses a flush until an aborted request is gone
            loads = self.get("/v1/loads?include=core")["loads"]
            busy = any(x["num_running_reqs"] + x["num_waiting_reqs"] for x in loads)
            if not busy and self.post("/flush_cache")[0] == 200 and self.used_tokens() == 0:
                return
            time.sleep(0.2)
        raise AssertionError(f"not every token is free after {timeout_s:.0f} s: {loads}")

    def require_unharmed(self) -> None:
        """Require that the server is alive and that SGLang's own idle checker has found no leak."""
        assert self.server.alive(), self.server.last_line()
        log = self.server.log.read_text(errors="replace")
        assert "leak" not in log.lower(), [x for x in log.splitlines() if "leak" in x.lower()][:3]
        assert "Scheduler hit an exception" not in log


class SharedServers:
    """Servers beside the prefill servers of a group, started at first use and ended with the group."""

    def __init__(self) -> None:
        self.group: str | None = None
        self._decode: servers.Server | None = None
        self._ends = ExitStack()

    def switch_to_group(self, group: str | None) -> None:
        """End the servers if they belong to another group."""
        if group != self.group:
            self.close()
        self.group = group

    def close(self) -> None:
        """End all servers."""
        self._ends.close()
        self._decode = None

    def decode(self, factory: pytest.TempPathFactory) -> servers.Server:
        """Return the running decode server; start it at first use."""
        if self._decode is None:
            log = factory.mktemp("decode") / "server.log"
            server = servers.decode(make_checkpoint(), log, "--max-total-tokens", "131072", env=SHORT_HEARTBEAT)
            self._ends.enter_context(servers.running(server))
            self._decode = server
        return self._decode


class Reference:
    """Greedy answers of a checkpoint under Hugging Face transformers."""

    def __init__(self, folder: Path, found: Path) -> None:
        """``found``: folder in which the processes of a test run share computed answers."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        lean.keep_memory(servers.KEEP_MEMORY)  # otherwise page faults take half the time of some architectures
        self.torch = torch
        self._found = found / folder.name
        self._found.mkdir(parents=True, exist_ok=True)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if getattr(self.model.config, "attn_logit_softcapping", None):  # PyTorch's own attention ignores softcapping
            self.model.set_attn_implementation("eager")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def copy_as(self, name: str) -> Reference:
        """Return a copy whose model the caller can change; its answers are shared under ``name``."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other._found = self._found / name
        other._found.mkdir(exist_ok=True)
        return other

    def next_token(self, ids: list[int]) -> tuple[int, float]:
        """Return the next id after `ids`, and the logarithm of its probability."""
        found = self._found / hashlib.sha256(repr(ids).encode()).hexdigest()
        if not found.exists():
            with self.torch.inference_mode():
                scores = self.model(self.torch.tensor([ids]), logits_to_keep=1).logits[0, -1].log_softmax(-1)
            part = found.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps([int(scores.argmax()), float(scores.max())]))
            part.rename(found)
        token, probability = json.loads(found.read_text())
        return token, probability

    def shortfall(self, ids: list[int], tokens: list[int]) -> float:
        """Return how far the log-probability of a token of `tokens` after `ids` is below the best one there, at most:
        0 if all are greedy."""
        if not tokens:
            return 0.0
        scores = self.scores(ids, tokens)
        return float((scores.max(-1).values - scores[range(len(tokens)), tokens]).max())

    def scores(self, ids: list[int], tokens: list[int]) -> Any:
        """Return log-probabilities of all ids at each position of `tokens` after `ids`: [tokens, ids]."""
        with self.torch.inference_mode():
            found = self.model(self.torch.tensor([ids + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
            return found.log_softmax(-1)

    def greedy(self, ids: list[int], tokens: int) -> list[int]:
        """Return the next `tokens` ids after `ids`."""
        if tokens == 1:
            return [self.next_token(ids)[0]]
        torch = self.torch
        out: list[int] = []
        with torch.inference_mode():
            step = self.model(torch.tensor([ids]), use_cache=True)
            for _ in range(tokens):
                out.append(int(step.logits[0, -1].argmax()))
                step = self.model(torch.tensor([[out[-1]]]), past_key_values=step.past_key_values, use_cache=True)
        return out


def random_prompt(seed: int, tokens: int) -> list[int]:
    """Return a random prompt of `tokens` token ids."""
    rng = random.Random(seed)
    return [rng.randrange(3, 2000) for _ in range(tokens)]


def request_body(room: int, prompt: list[int], rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    """Return a body for ``/generate`` that a prefill server answers without a decode server. `room`: bootstrap room."""
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, **sampling},
        **without_decode_server(room),
    }
    return body if rid is None else {**body, "rid": rid}


async def count_in_progress(http: Any, prefill: Prefill) -> int:
    """Return the number of long prompts that are between two chunks."""
    async with http.get(prefill.server.url + "/laps_status") as reply:
        return int((await reply.json())["in_progress"])


async def abort_everything(prefill: Prefill, prompts: list[list[int]], short_requests: int) -> None:
    """Send `prompts` and abort all requests once a prompt is between two chunks. If no prompt has been seen there, try
    again with other prompts of these lengths. Then require answers to `short_requests` short requests."""
    async with load.session() as http:
        for i in range(ROUNDS):
            fresh_prompts = [[3 + (token + i) % 1997 for token in prompt] for prompt in prompts]
            sending = asyncio.gather(*(send_all(prefill, [prompt]) for prompt in fresh_prompts), return_exceptions=True)
            while not sending.done() and not (seen := await count_in_progress(http, prefill)):
                pass
            async with http.post(prefill.server.url + "/abort_request", json={"rid": "", "abort_all": True}) as reply:
                assert reply.status == 200
            await sending
            if seen:
                break
        assert seen, "none was in progress"
    assert len(await send_all(prefill, [random_prompt(i, 30) for i in range(short_requests)])) == short_requests


async def send_all(prefill: Prefill, prompts: list[list[int]], spread_s: float = 0.0) -> list[int]:
    """Send all prompts within `spread_s` (seconds) and return the first token of each answer."""
    rng = random.Random(len(prompts))

    async def send_one(http: Any, prompt: list[int]) -> int:
        await asyncio.sleep(rng.random() * spread_s)
        async with http.post(prefill.server.url + "/generate", json=request_body(rng.getrandbits(60), prompt)) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return int(answer["output_ids"][0])

    async with load.session() as http:
        return list(await asyncio.gather(*(send_one(http, p) for p in prompts)))
