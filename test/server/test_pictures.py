"""Vision-language models: passes pause in the encoder and in the layers, and every token is right.

Here answers are compared; graphs_model/test_slices.py tests pauses in an encoder with the toy model.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import http_load as load
import pictures
import pytest
from rounds import repeat_until
from served import LAPS, NORMAL_LOOP, Prefill, Setup, make_checkpoint, run_on
from sglang_laps import compat

from benchmark.load.prompts import without_decode_server
from benchmark.rig import model

from .colocated import FREQUENT_PAUSES, Request, abort_some, send_again, send_all_at_their_times
from .slicing import PAUSE_AFTER_EACH_LAYER, count_preemptions
from .test_architectures import CHAIN
from .test_colocated_drafts import mtp_args

DRAFTS = Setup(
    "pictures-drafts",
    (*LAPS, *FREQUENT_PAUSES, *CHAIN, "--speculative-algorithm", "NEXTN"),
    shape="qwen3_5",
    extra_args=mtp_args,
    mode="null",
)
DECODING = (
    Setup("pictures-colocated", (*LAPS, *FREQUENT_PAUSES), shape="qwen3_vl", mode="null"),
    Setup("pictures-states", (*LAPS, *FREQUENT_PAUSES, *NORMAL_LOOP), shape="qwen3_5", mode="null"),
    *([DRAFTS] if compat.release().drafts_in_pauses else []),
)
PREFILL = Setup("pictures-prefill", (*LAPS, *PAUSE_AFTER_EACH_LAYER, *NORMAL_LOOP), shape="qwen2_5_vl")
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("clean")]
COUNT = 40


@cache
def answers(name: str) -> pictures.Answers:
    """Return the answers of transformers for this checkpoint."""
    return pictures.Answers(make_checkpoint(name))


@dataclass
class PictureRequest(Request):
    """A request with pictures."""

    says: str = ""
    pictures: tuple[str, ...] = ()
    room: int | None = None
    """Bootstrap room; None on a server that decodes."""

    def body(self) -> dict[str, Any]:
        """Return the body for ``/generate``."""
        body = {**super().body(), "text": self.says}
        del body["input_ids"]
        if self.pictures:
            body["image_data"] = list(self.pictures)
        if self.room is not None:
            body |= without_decode_server(self.room)
        return body


def picture_requests(prefill: Prefill, number: int) -> list[PictureRequest]:
    """Return requests: documents of pictures, questions about one picture, and questions without a picture."""
    rng, decodes = random.Random(number), prefill.setup.mode == "null"
    words = [w for w in (model.REPO / "README.md").read_text().split() if w.isascii() and "|" not in w]

    def one(i: int) -> PictureRequest:
        text, seen = pictures.make_prompt(rng, words, long=i % 4 == 0)
        new, room = (rng.randrange(2, 30), None) if decodes else (1, rng.getrandbits(60))
        rid = f"{prefill.setup.name}-{number}-{i}-x"
        return PictureRequest(rid, [], new, 2.0 * rng.random(), says=text, pictures=seen, room=room)

    return [one(i) for i in range(COUNT)]


@run_on(*DECODING, PREFILL)[0]
def test_picture_prompts_get_correct_tokens_under_preemption(prefill: Prefill) -> None:
    """Lets a third of the clients disconnect or abort."""
    name = str(prefill.setup.shape)

    def attempt(i: int) -> bool:
        before, requests = count_preemptions(prefill), picture_requests(prefill, i)
        abort_some([*requests], random.Random(i))
        asyncio.run(send_all_at_their_times(prefill, [*requests]))
        require_right_answers(requests, name)
        prefill.require_all_tokens_free()
        stayed = [a for a in requests if a.leaves_after_s is None and a.steps]
        if stayed:  # only with drafts, which are right as often as alone
            pairs = zip(stayed, send_again(prefill, [*stayed]), strict=True)
            calm = [(a, b) for a, b in pairs if not a.retractions]  # a retracted one gets a token without a draft
            same = [(a.steps, b.steps) for a, b in calm if a.tokens == b.tokens]  # the others had a tie
            assert len(same) >= 0.9 * len(calm)
            assert sum(a for a, _ in same) == sum(b for _, b in same)
        return count_preemptions(prefill) > before

    repeat_until(attempt, "a batch preempts")


@run_on(*DECODING)[0]
def test_abort_ends_paused_prompt_with_pictures(prefill: Prefill) -> None:
    def abandoned() -> int:
        return int(prefill.get("/laps_status")["decode"]["abandoned_passes"])

    before, name = abandoned(), str(prefill.setup.shape)

    def attempt(i: int) -> bool:
        rng, every = random.Random(i), picture_requests(prefill, 100 + i)
        streams, documents = every[2::20], [a for a in every if len(a.pictures) > 1]
        for a in streams:
            a.at_s, a.new = 0.0, 40
        for n, a in enumerate(documents):  # one at a time, if the machine is quiet
            a.at_s, a.says = 0.3 * (n + 1), a.says + " ".join(str(rng.randrange(1000)) for _ in range(200))
            a.leaves_after_s, a.aborts = 0.3 * 1.3**i * rng.random(), True  # a busy machine needs longer
        requests = [*streams, *documents]
        asyncio.run(send_all_at_their_times(prefill, [*requests]))
        require_right_answers(requests, name)
        prefill.require_all_tokens_free()
        return abandoned() > before

    repeat_until(attempt, "a prompt is aborted in a pause")


@run_on(DECODING[0])[0]
def test_closed_session_keeps_pictures_until_its_prompts_end(prefill: Prefill) -> None:
    """Without that, the second of two encoder calls fails, and with it the server."""
    name = str(prefill.setup.shape)

    async def post(http: Any, route: str, body: dict[str, Any]) -> None:
        async with http.post(f"{prefill.server.url}/{route}", json=body) as reply:
            assert reply.status == 200, await reply.text()

    async def scenario(i: int) -> list[PictureRequest]:
        """Return the requests that ran, although their session was closed before their end."""
        rng, asked = random.Random(i), [a for a in picture_requests(prefill, 200 + i) if a.pictures]
        left, early = list(asked), list[PictureRequest]()
        async with load.session() as http:
            for a in asked:
                a.at_s, a.session = 0.0, {"id": a.rid, "rid": None}
                await post(http, "open_session", {"capacity_of_str_len": 100_000, "session_id": a.rid})
            sending = asyncio.ensure_future(send_all_at_their_times(prefill, [*asked]))
            while left:
                for a in [a for a in left if sending.done() or rng.random() < 0.1]:
                    left.remove(a)
                    early += [a] if a.end is None else []
                    await post(http, "close_session", {"session_id": a.rid})
                await asyncio.sleep(0.02)
            await sending
        return [a for a in early if a.end["type"] != "abort"]  # aborted: the session was closed before it came

    def attempt(i: int) -> bool:
        unhindered = asyncio.run(scenario(i))
        require_right_answers([*unhindered], name)
        prefill.require_all_tokens_free()
        return len(unhindered) > 3

    repeat_until(attempt, "sessions are closed while their prompts wait")


def require_right_answers(requests: list[PictureRequest], name: str) -> None:
    """Require that all received tokens are right, and that clients that stayed received all tokens."""
    for a in requests:
        assert a.leaves_after_s is not None or len(a.tokens) == a.new, (a.rid, a.end)
        right = answers(name).greedy(a.says, a.pictures, len(a.tokens)) if a.tokens else []
        assert a.tokens[: len(right)] == right, f"{a.rid}, {len(a.pictures)} pictures"
