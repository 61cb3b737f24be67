"""``POST /laps_replay``: one replay at a time, in a separate process, for a bounded time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from sglang_laps import replay_route
from sglang_laps.replay_route import Replays

Answer = tuple[int, Any]


class Scripted(Replays):
    """Replays that run a script in place of ``laps-plan``."""

    def __init__(self, script: str, url: str = "http://127.0.0.1:9", **how: Any) -> None:
        super().__init__(lambda: url, lambda: "the key", **how)
        self.script = script
        self.asked: list[float] = []

    def _command(self, wanted: replay_route.Wanted) -> Sequence[str]:
        self.asked.append(wanted.seconds)
        return [sys.executable, "-c", self.script]


async def ask(replays: Replays, body: bytes = b'{"seconds": 30}') -> Answer:
    code, text = await replays.answer(body)
    return code, msgspec.json.decode(text)


TELL = "import json, os; print(json.dumps([os.environ['LAPS_API_KEY'], os.getpid()]))"


def test_the_answer_is_that_of_another_process_which_has_the_key() -> None:
    replays = Scripted(TELL)
    code, (key, pid) = asyncio.run(ask(replays))
    assert (code, key) == (200, "the key")
    assert pid != os.getpid()
    assert asyncio.run(ask(replays, b""))[0] == 200
    assert replays.asked == [30.0, 60.0]


@pytest.mark.parametrize("body", [b"[]", b'{"seconds": 0}', b'{"seconds": 1e9}', b'{"second": 1}', b"{"])
def test_bad_questions_are_refused(body: bytes) -> None:
    replays = Scripted(TELL)
    assert asyncio.run(ask(replays, body))[0] == 400
    assert replays.asked == []


def test_one_at_a_time_of_each_server() -> None:
    async def three() -> list[int]:
        slow = "import time; time.sleep(1.0); print(1)"
        same = (Scripted(slow), Scripted(slow))
        answers = await asyncio.gather(*(ask(r) for r in same), ask(Scripted(TELL, url="http://127.0.0.1:10")))
        return [code for code, _ in answers] + [(await ask(same[1]))[0]]

    assert asyncio.run(three()) == [200, 409, 200, 200]


def test_one_that_takes_too_long_is_ended() -> None:
    code, said = asyncio.run(ask(Scripted("import time; time.sleep(60)", longest_s=0.3)))
    assert code == 504
    assert "0.3 s" in said["error"]["message"]


def test_a_client_that_goes_leaves_nothing_behind() -> None:
    async def leave() -> int:
        replays = Scripted("import time; time.sleep(60)")
        asked = asyncio.create_task(ask(replays))
        await asyncio.sleep(0.3)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        replays.script = TELL
        return (await ask(replays))[0]

    assert asyncio.run(leave()) == 200


def test_the_command_is_laps_plan_behind_everything_else() -> None:
    code, said = asyncio.run(ask(Replays(lambda: "http://127.0.0.1:9", lambda: None)))
    assert code == 503
    assert said["error"]["message"].startswith("laps-plan: http://127.0.0.1:9/laps_status: ")
    assert "os.nice(19)" in replay_route.NICED
    assert json.dumps(said)
