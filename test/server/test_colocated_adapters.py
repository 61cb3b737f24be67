"""Servers that prefill and decode with LoRA adapters: streams of one adapter continue in the pauses of a prompt of
another adapter."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import adapters
import http_load as load
import pytest
from rounds import repeat_until
from served import LAPS, Prefill, Reference, Setup, make_checkpoint, prefill_server, random_prompt, run_on

from benchmark.rig import servers

from .colocated import (
    COUNT,
    FREQUENT_PAUSES,
    LOOPS,
    Request,
    abort_some,
    mixed_requests,
    require_right_answers,
    send_all_at_their_times,
)
from .test_architectures import lora_args, lora_folders, with_adapters

TWO_SLOTS = ("--max-loras-per-batch", "2")
"""Arguments for one slot fewer than needed: requests without an adapter need a slot, too."""
SETUPS = tuple(
    Setup(f"colocated-lora-{name}", (*LAPS, *FREQUENT_PAUSES, *TWO_SLOTS, *flags), {}, "qwen2", lora_args, mode="null")
    for name, flags in LOOPS.items()
)
pytestmark = [pytest.mark.timeout(600 + 5 * COUNT), *run_on(*SETUPS)]


def test_tokens_match_requested_lora_adapter(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort."""
    models = with_adapters(reference)
    before = prefill.get("/laps_status")

    def attempt(i: int) -> bool:
        rng, requests = random.Random(i), mixed_requests(100 * i + 1, COUNT, f"{prefill.setup.name}-{i}", COUNT / 12)
        for a in requests:
            a.adapter = rng.choice([*models])
        abort_some(requests, rng)
        asyncio.run(send_all_at_their_times(prefill, requests))
        for name, model in models.items():
            require_right_answers([a for a in requests if a.adapter == name], model)
        prefill.require_all_tokens_free()
        after = prefill.get("/laps_status")
        assert after["enabled"], after["reason"]
        steps = after["decode"]["steps_in_pauses"] - before["decode"]["steps_in_pauses"]
        return steps > 0 and after["preemption"]["by_short_batches"] > before["preemption"]["by_short_batches"]

    repeat_until(attempt, "steps and short batches run in pauses")


def test_adapters_are_loaded_and_unloaded_under_load(prefill: Prefill, reference: Reference) -> None:
    models = with_adapters(reference)
    folders = {f"adapter{i}": folder for i, folder in enumerate(lora_folders(make_checkpoint("qwen2")))}
    requests = mixed_requests(4001, COUNT, f"{prefill.setup.name}-loads", COUNT / 12)
    for i, a in enumerate(requests):
        a.adapter = [*models][i % 3]
    loaded: dict[str, list[Request]] = {name: [] for name in folders}

    async def use_copies(http: Any, name: str) -> None:
        """Load a copy of an adapter under another name, use it and unload it, three times."""

        async def post(route: str, **body: str) -> None:
            async with http.post(f"{prefill.server.url}/{route}_lora_adapter", json=body) as reply:
                assert reply.status == 200, await reply.text()

        for i in range(3):
            a = Request(
                f"copy-{name}-{i}", random_prompt(4100 + i, 60 if i % 2 else 1500), 4, 0.0, adapter=f"{name}-{i}"
            )
            loaded[name].append(a)
            await post("load", lora_name=f"{name}-{i}", lora_path=str(folders[name]))
            await a.stream_answer(http, prefill.server.url)
            await post("unload", lora_name=f"{name}-{i}")

    async def scenario() -> None:
        async with load.session() as http:
            copies = (use_copies(http, name) for name in folders)
            await asyncio.gather(send_all_at_their_times(prefill, requests), *copies)

    asyncio.run(scenario())
    for name, model in models.items():
        require_right_answers([*(a for a in requests if a.adapter == name), *loaded.get(name or "", ())], model)
    prefill.require_all_tokens_free()


def test_adapters_that_do_not_fit_model_are_refused(prefill: Prefill, reference: Reference) -> None:
    base = make_checkpoint("qwen2")
    fitting = lora_folders(base)[0]
    for kind in adapters.MISFITS:
        wrong = {"lora_name": "other", "lora_path": str(adapters.make_misfit(base.parent, fitting, kind))}
        status, text = prefill.post("/load_lora_adapter", wrong)
        assert (status, "does not fit this model" in text) == (400, True), (kind, text)
        # Nothing is left of the refused adapter.
        assert prefill.post("/load_lora_adapter", {**wrong, "lora_path": str(fitting)})[0] == 200, kind
        a = Request(f"fits-{kind}", random_prompt(4200, 60), 4, 0.0, adapter="other")
        asyncio.run(send_all_at_their_times(prefill, [a]))
        require_right_answers([a], with_adapters(reference)["adapter0"])
        assert prefill.post("/unload_lora_adapter", {"lora_name": "other"})[0] == 200, kind


def test_server_does_not_start_with_adapter_that_does_not_fit(prefill: Prefill, tmp_path: Path) -> None:
    def args(base: Path) -> list[str]:
        wrong = adapters.make_misfit(base.parent, lora_folders(base)[0], "a wider model")
        return ["--lora-paths", f"adapter0={wrong}"]

    setup = Setup("misfit", LAPS, {}, "qwen2", args, mode="null")
    with (
        prefill_server(setup, tmp_path) as server,
        pytest.raises(servers.ServerError, match="LoRA adapter adapter0: the adapter does not fit"),
    ):
        server.ready()
