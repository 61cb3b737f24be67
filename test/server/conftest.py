"""Real servers for the tests: started once a module, checked after each test, ended by their own pid."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmark.rig import model, servers

CHUNK = 512
PREFILL = ("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "49152", "--enable-metrics")
LAPS = ("--enable-laps-scheduler",)
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def mixin() -> Any:
    """What LAPS puts before SGLang's scheduler. Imported when it is needed: SGLang takes its time."""
    os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
    from sglang_laps.scheduler import LapsPrefillMixin

    return LapsPrefillMixin


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The small checkpoint, made once."""
    return model.make(Path(os.environ.get("LAPS_MODELS", model.REPO / "out" / "models")))


class Prefill:
    """A running prefill server and what tests ask of it."""

    def __init__(self, server: servers.Server) -> None:
        self.server = server
        self.laps = LAPS[0] in server.command

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.server.url + path, timeout=60) as reply:
            text = reply.read().decode()
        return json.loads(text) if text[:1] in ("{", "[") else text

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        return self.post_text(path, json.dumps(body or {}))

    def post_text(self, path: str, text: str) -> tuple[int, str]:
        request = urllib.request.Request(self.server.url + path, text.encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()

    def totals(self) -> dict[str, Any]:
        return dict(self.get("/laps_status")["totals"])

    def used_tokens(self) -> int:
        """KV tokens held by requests or the prefix cache, over all ranks."""
        return sum(load["num_used_tokens"] for load in self.get("/v1/loads?include=core")["loads"])

    def all_tokens_are_free(self, timeout_s: float = 60.0) -> None:
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


@pytest.fixture(scope="session")
def start_prefill(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """start_prefill(*args, env=...) as a context manager."""

    @contextmanager
    def running(*args: str, env: dict[str, str] | None = None) -> Iterator[Prefill]:
        log = tmp_path_factory.mktemp("prefill") / "server.log"
        server = servers.prefill(checkpoint, log, *PREFILL, *args, env={**ENV, **(env or {})})
        with servers.running(server):
            yield Prefill(server)

    return running


@pytest.fixture
def clean(prefill: Prefill) -> Iterator[None]:
    """The module's server is unharmed by the test."""
    yield
    prefill.must_be_clean()


class Reference:
    """The same checkpoint under Hugging Face transformers, greedy."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoTokenizer, Qwen2ForCausalLM

        torch.set_num_threads(1)
        self.torch = torch
        self.model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def greedy(self, ids: list[int], tokens: int) -> list[int]:
        """The next `tokens` ids after `ids`."""
        torch = self.torch
        out: list[int] = []
        with torch.inference_mode():
            step = self.model(torch.tensor([ids]), use_cache=True)
            for _ in range(tokens):
                out.append(int(step.logits[0, -1].argmax()))
                step = self.model(torch.tensor([[out[-1]]]), past_key_values=step.past_key_values, use_cache=True)
        return out


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)
