"""Real prefill servers for the tests, what is asked of them, and the answers they should give."""

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
AT_ONCE = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
"""A server that has answered its own first request says at once that it is ready: it has no need of another, for which
the route of its health waits a second."""
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""States of linear attention are as exact as all else: otherwise half of them is bfloat16."""
SOON = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"}
"""A decode server learns within 4 s (10 by default) that a prefill server is dead. Until then it spins."""
HICACHE = Path(__file__).with_name("hicache")
"""Plugin with which HiCache copies between device and host without a GPU."""
FOLDER = "FOLDER"
"""Stands in a server's arguments for a folder of its own."""
SHAPE = model.Shape()
SEVERAL = "several"
"""The group of tests that need more than one server at a time: memory does not hold two of them side by side."""


@dataclass(frozen=True)
class Setup:
    """How a prefill server is started. Tests that name the same one share one server."""

    name: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, hash=False)
    shape: model.Shape | str = SHAPE
    """Shape of the Qwen2 model, or a name in ``architectures.NAMES``."""
    more: Callable[[Path], Sequence[str]] | None = None
    """Further arguments, from the folder of the checkpoint: they name what is made beside it."""
    mode: str = "prefill"
    """Mode, as of ``servers.sglang``."""
    group: str | None = None
    """Setups of a group run in one process after one another, and share what runs beside them."""


STOCK = Setup("stock", NORMAL_LOOP, group=SEVERAL)
NORMAL = Setup("normal", (*LAPS, *NORMAL_LOOP), group=SEVERAL)
OVERLAP = Setup("overlap", LAPS, group=SEVERAL)
NO_PREFIX_CACHE = Setup(
    "no-prefix-cache",
    (*LAPS, "--disable-radix-cache", "--laps-wait-window-ms", "0", "--laps-config", '{"receipts": false}'),
)
"""Without receipts, too."""
SAVED = "model.json"
SLOW_WINDOW = Setup(
    "slow-window",
    (
        *(*LAPS, "--page-size", "64", "--chunked-prefill-size", "192", "--laps-wait-window-ms", "2000"),
        *("--laps-config", json.dumps({"profile": f"{FOLDER}/{SAVED}"})),
    ),
)
"""Pages, too. It saves its latency model."""


def on(*setups: Setup) -> list[pytest.MarkDecorator]:
    """Marks of a test, or of a module's ``pytestmark``: it runs on each of these servers, and leaves them unharmed."""
    ids = [f"{s.name}@{s.group}" if s.group else f"@{s.name}" for s in setups]
    each = pytest.mark.parametrize("prefill", setups, indirect=True, ids=ids, scope="session")
    return [each, pytest.mark.usefixtures("clean")]


def checkpoint(shape: model.Shape | str = SHAPE) -> Path:
    """The small model of this shape, made once, whoever else is about to make it."""
    folder = Path(os.environ.get("LAPS_MODELS", model.REPO / "out" / "models"))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".tests").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return architectures.make(folder, shape) if isinstance(shape, str) else model.make(folder, shape)


def prefill_server(setup: Setup, folder: Path, name: str = "prefill server") -> servers.Server:
    """A prefill server, not started. Its log is in ``folder``."""
    args = ["--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "49152", "--enable-metrics"]
    args += ["--enable-cache-report", *(a.replace(FOLDER, str(folder)) for a in setup.args)]
    made = checkpoint(setup.shape)
    args += setup.more(made) if setup.more else ()
    env = {**AT_ONCE, **EXACT, **servers.KEEP_MEMORY, **setup.env}
    return servers.sglang(setup.mode, made, folder / "server.log", *args, env=env, name=name)


@contextmanager
def started(setup: Setup, folder: Path) -> Iterator[Prefill]:
    """A running prefill server."""
    server = prefill_server(setup, folder)
    try:
        yield Prefill(setup, server.start().ready())
    finally:
        server.kill()  # told to end, it would first look for work for 5 s


class Prefill:
    """A running prefill server and what tests ask of it."""

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
        """KV tokens held by requests or the prefix cache, over all ranks."""
        return sum(load["num_used_tokens"] for load in self.get("/v1/loads?include=core")["loads"])

    def all_tokens_are_free(self, timeout_s: float = 180.0) -> None:
        """Wait until nothing waits or runs, drop the prefix cache, and require every KV token to be free."""
        end, loads = time.monotonic() + timeout_s, None
        while time.monotonic() < end:  # a flush is refused while an abort is still being retired
            loads = self.get("/v1/loads?include=core")["loads"]
            busy = any(x["num_running_reqs"] + x["num_waiting_reqs"] for x in loads)
            if not busy and self.post("/flush_cache")[0] == 200 and self.used_tokens() == 0:
                return
            time.sleep(0.2)
        raise AssertionError(f"not every token is free after {timeout_s:.0f} s: {loads}")

    def must_be_clean(self) -> None:
        """Alive, and SGLang's own idle checker has found nothing wrong."""
        assert self.server.alive(), self.server.last_line()
        log = self.server.log.read_text(errors="replace")
        assert "leak" not in log.lower(), [x for x in log.splitlines() if "leak" in x.lower()][:3]
        assert "Scheduler hit an exception" not in log


class Beside:
    """Servers beside the prefill server of a group: started when a test needs them first, ended with the group."""

    def __init__(self) -> None:
        self.group: str | None = None
        self._decode: servers.Server | None = None
        self._ends = ExitStack()

    def of(self, group: str | None) -> None:
        """End what belongs to another group."""
        if group != self.group:
            self.close()
        self.group = group

    def close(self) -> None:
        """End everything."""
        self._ends.close()
        self._decode = None

    def decode(self, factory: pytest.TempPathFactory) -> servers.Server:
        """The decode server, running."""
        if self._decode is None:
            log = factory.mktemp("decode") / "server.log"
            server = servers.decode(checkpoint(), log, "--max-total-tokens", "131072", env=SOON)
            self._ends.enter_context(servers.running(server))
            self._decode = server
        return self._decode


class Reference:
    """The same checkpoint under Hugging Face transformers, greedy."""

    def __init__(self, folder: Path, found: Path) -> None:
        """``found``: folder where processes of a run tell each other what they have computed."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        lean.keep_memory(servers.KEEP_MEMORY)  # or half the time of some architectures goes into page faults
        self.torch = torch
        self._found = found / folder.name
        self._found.mkdir(parents=True, exist_ok=True)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if getattr(self.model.config, "attn_logit_softcapping", None):  # which PyTorch's own attention leaves out
            self.model.set_attn_implementation("eager")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def apart(self, name: str) -> Reference:
        """The same with a model of its own, to be changed; its answers are told by this ``name``."""
        made = copy.copy(self)
        made.model = copy.deepcopy(self.model)
        made._found = self._found / name
        made._found.mkdir(exist_ok=True)
        return made

    def first(self, ids: list[int]) -> tuple[int, float]:
        """The next id after `ids`, and the logarithm of its probability."""
        found = self._found / hashlib.sha256(repr(ids).encode()).hexdigest()
        if not found.exists():
            with self.torch.inference_mode():
                scores = self.model(self.torch.tensor([ids]), logits_to_keep=1).logits[0, -1].log_softmax(-1)
            part = found.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps([int(scores.argmax()), float(scores.max())]))
            part.rename(found)
        token, probability = json.loads(found.read_text())
        return token, probability

    def after_each(self, ids: list[int], tokens: list[int]) -> list[int]:
        """The next id after `ids`, after those and the first of `tokens`, and so on: `tokens` itself, where all of them
        are what ``greedy`` says. In one pass."""
        return [int(t) for t in self.scores(ids, tokens).argmax(-1)] if tokens else []

    def scores(self, ids: list[int], tokens: list[int]) -> Any:
        """Logarithms of the probabilities of all ids after `ids`, after those and the first of `tokens`, and so on
        [tokens, ids]."""
        with self.torch.inference_mode():
            found = self.model(self.torch.tensor([ids + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
            return found.log_softmax(-1)

    def greedy(self, ids: list[int], tokens: int) -> list[int]:
        """The next `tokens` ids after `ids`."""
        if tokens == 1:
            return [self.first(ids)[0]]
        torch = self.torch
        out: list[int] = []
        with torch.inference_mode():
            step = self.model(torch.tensor([ids]), use_cache=True)
            for _ in range(tokens):
                out.append(int(step.logits[0, -1].argmax()))
                step = self.model(torch.tensor([[out[-1]]]), past_key_values=step.past_key_values, use_cache=True)
        return out


def ids(seed: int, tokens: int) -> list[int]:
    """A prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, 2000) for _ in range(tokens)]


def ask(room: int, prompt: list[int], rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    """A body for ``/generate`` that a prefill server answers without any decode server."""
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, **sampling},
        **without_decode_server(room),
    }
    return body if rid is None else {**body, "rid": rid}


async def in_progress(http: Any, prefill: Prefill) -> int:
    """Long prompts between two of their chunks."""
    async with http.get(prefill.server.url + "/laps_status") as reply:
        return int((await reply.json())["in_progress"])


async def abort_everything(prefill: Prefill, prompts: list[list[int]], after: int) -> None:
    """Abort all of these once one is in progress, with further prompts of their lengths if none has been seen to be; as
    many short requests `after` it are answered."""
    async with load.session() as http:
        for i in range(ROUNDS):
            them = [[3 + (token + i) % 1997 for token in prompt] for prompt in prompts]
            sending = asyncio.gather(*(send_all(prefill, [prompt]) for prompt in them), return_exceptions=True)
            while not sending.done() and not (seen := await in_progress(http, prefill)):
                pass
            async with http.post(prefill.server.url + "/abort_request", json={"rid": "", "abort_all": True}) as reply:
                assert reply.status == 200
            await sending
            if seen:
                break
        assert seen, "none was in progress"
    assert len(await send_all(prefill, [ids(i, 30) for i in range(after)])) == after


async def send_all(prefill: Prefill, prompts: list[list[int]], spread_s: float = 0.0) -> list[int]:
    """First token of each prompt, all sent within `spread_s`."""
    rng = random.Random(len(prompts))

    async def one(http: Any, prompt: list[int]) -> int:
        await asyncio.sleep(rng.random() * spread_s)
        async with http.post(prefill.server.url + "/generate", json=ask(rng.getrandbits(60), prompt)) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return int(answer["output_ids"][0])

    async with load.session() as http:
        return list(await asyncio.gather(*(one(http, p) for p in prompts)))
