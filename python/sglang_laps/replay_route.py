"""``POST /laps_replay``: what this server's last requests would have waited under other policies, computed in a process
of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import msgspec
from fastapi import FastAPI, Request, Response
from laps_plan.asking import KEY
from sglang.srt.runtime_context import get_serving
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_laps.errors import error

REPLAY_ROUTE = "laps_replay"
LONGEST_S = 120.0
"""A replay that takes longer is ended (seconds)."""
NICED = (
    "import os, sys; os.nice(19); from laps_plan.replay.command import run; "
    "sys.exit(run(sys.argv[1], float(sys.argv[2]), as_json=True))"
)
"""Program of the process: ``laps-plan --replay --json``, behind everything else that wants the CPU."""


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The question."""

    seconds: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 60.0
    """Length of the stretch that is replayed, up to now."""


class Replays:
    """Runs one replay at a time, whichever HTTP process of the server is asked."""

    def __init__(self, url: Callable[[], str], key: Callable[[], str | None], longest_s: float = LONGEST_S) -> None:
        """`url`, `key`: of the server itself."""
        self._url, self._key, self._longest_s = url, key, longest_s

    @classmethod
    def of_this_server(cls) -> Replays:
        """Return the replays of the server that this process answers for."""
        from sglang.srt.entrypoints.http_server import get_global_state

        def url() -> str:
            return str(get_global_state().tokenizer_manager.server_args.url())

        return cls(url, lambda: get_serving().admin_api_key or get_serving().api_key)

    async def answer(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a question: 200, 400 for what is none, 409 while another one runs, 503 where
        there is nothing to replay, 504 where it took too long."""
        try:
            wanted = msgspec.json.decode(body or b"{}", type=Wanted)
        except (msgspec.MsgspecError, UnicodeError) as e:
            return error(400, str(e))
        with self._alone() as alone:
            if not alone:
                return error(409, "another replay is running")
            return await self._run(self._command(wanted))

    def _command(self, wanted: Wanted) -> Sequence[str]:
        return [sys.executable, "-c", NICED, self._url(), f"{wanted.seconds:g}"]

    async def _run(self, command: Sequence[str]) -> tuple[int, bytes]:
        key = self._key()
        env = {**os.environ, **({KEY: key} if key else {})}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=env)
        try:
            out, err = await asyncio.wait_for(process.communicate(), self._longest_s)
        except TimeoutError:
            return error(504, f"the replay took longer than {self._longest_s:g} s")
        finally:
            # Also where the client has gone.
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = err.decode(errors="replace").strip().splitlines()
            return error(503, lines[-1] if lines else "the replay failed")
        return 200, out

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock of this server's replays; False if another has it."""
        # A name that one process of the machine has, and loses when it ends.
        with socket.socket(socket.AF_UNIX) as held:
            try:
                held.bind(f"\0laps-replay {self._url()}"[:100])
            except OSError:
                yield False
                return
            yield True


def add(app: FastAPI, replays: Replays) -> None:
    """Add the route."""

    @app.post(f"/{REPLAY_ROUTE}")  # type: ignore[untyped-decorator,unused-ignore]
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator,unused-ignore]
    async def laps_replay(request: Request) -> Response:
        """Run the last requests again in the simulator, under other policies and with other knobs."""
        status, text = await replays.answer(await request.body())
        return Response(text, status, media_type="application/json")
