"""Vision-language models: passes pause in the encoder and in the layers, and every token is right.

Here answers are compared; graphs_model/test_slices.py tests pauses in an encoder with the toy model.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pictures
import pytest
from rounds import until_seen
from served import LAPS, NORMAL_LOOP, Prefill, Setup, checkpoint, on
from sglang_laps import compat

from benchmark.load.prompts import without_decode_server
from benchmark.rig import model

from .colocated import EVERY_PAUSE, Asked, alone, at_once, some_leave
from .slicing import EVERY_LAYER, preemptions
from .test_architectures import CHAIN
from .test_colocated_drafts import next_tokens_args

DRAFTS = Setup(
    "pictures-drafts",
    (*LAPS, *EVERY_PAUSE, *CHAIN, "--speculative-algorithm", "NEXTN"),
    shape="qwen3_5",
    more=next_tokens_args,
    mode="null",
)
DECODING = (
    Setup("pictures-colocated", (*LAPS, *EVERY_PAUSE), shape="qwen3_vl", mode="null"),
    Setup("pictures-states", (*LAPS, *EVERY_PAUSE, *NORMAL_LOOP), shape="qwen3_5", mode="null"),
    *([DRAFTS] if compat.release().drafts_in_pauses else []),
)
PREFILL = Setup("pictures-prefill", (*LAPS, *EVERY_LAYER, *NORMAL_LOOP), shape="qwen2_5_vl")
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("clean")]
COUNT = 40


@cache
def answers(name: str) -> pictures.Answers:
    """Return the answers of transformers for this checkpoint."""
    return pictures.Answers(checkpoint(name))


@dataclass
class Shown(Asked):
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


def crowd(prefill: Prefill, number: int) -> list[Shown]:
    """Return requests: documents of pictures, questions about one picture, and questions without a picture."""
    rng, decodes = random.Random(number), prefill.setup.mode == "null"
    words = [w for w in (model.REPO / "README.md").read_text().split() if w.isascii() and "|" not in w]

    def one(i: int) -> Shown:
        text, seen = pictures.prompt(rng, words, long=i % 4 == 0)
        new, room = (rng.randrange(2, 30), None) if decodes else (1, rng.getrandbits(60))
        rid = f"{prefill.setup.name}-{number}-{i}-x"
        return Shown(rid, [], new, 2.0 * rng.random(), says=text, pictures=seen, room=room)

    return [one(i) for i in range(COUNT)]


@on(*DECODING, PREFILL)[0]
def test_every_token_is_right_with_pictures_among_paused_and_preempting(prefill: Prefill) -> None:
    """Lets a third of the clients disconnect or abort."""
    name = str(prefill.setup.shape)

    def once(i: int) -> bool:
        before, asked = preemptions(prefill), crowd(prefill, i)
        some_leave([*asked], random.Random(i))
        asyncio.run(at_once(prefill, [*asked]))
        must_be_right(asked, name)
        prefill.all_tokens_are_free()
        stayed = [a for a in asked if a.leaves_s is None and a.steps]
        if stayed:  # only with drafts, which are right as often as alone
            assert sum(a.steps for a in stayed) == sum(a.steps for a in alone(prefill, [*stayed]))
        return preemptions(prefill) > before

    until_seen(once, "a batch preempts")


@on(*DECODING)[0]
def test_an_abort_ends_a_paused_prompt_with_pictures(prefill: Prefill) -> None:
    def abandoned() -> int:
        return int(prefill.get("/laps_status")["decode"]["abandoned_passes"])

    before, name = abandoned(), str(prefill.setup.shape)

    def once(i: int) -> bool:
        rng, asked = random.Random(i), crowd(prefill, 100 + i)
        for a in asked:
            if len(a.pictures) > 1:
                a.leaves_s, a.aborts = 0.1 * (1 + i) * rng.random(), True  # a busy machine prepares pictures for longer
        asyncio.run(at_once(prefill, [*asked]))
        must_be_right(asked, name)
        prefill.all_tokens_are_free()
        return abandoned() > before

    until_seen(once, "a prompt is aborted in a pause")


def must_be_right(asked: list[Shown], name: str) -> None:
    """Require that all received tokens are right, and that clients that stayed received all tokens."""
    for a in asked:
        assert a.leaves_s is not None or len(a.tokens) == a.new, (a.rid, a.end)
        right = answers(name).greedy(a.says, a.pictures, len(a.tokens)) if a.tokens else []
        assert a.tokens == right, f"{a.rid}, {len(a.pictures)} pictures"
