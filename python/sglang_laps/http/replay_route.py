"""``POST /laps_replay``: the waits that this server's last requests would have had under other policies, computed in a
separate process."""

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

from sglang_laps.http.errors import error
from sglang_laps.http.routes import reply, serve

REPLAY_ROUTE = "laps_replay"
LONGEST_S = 120.0
"""Longest duration of a replay; a longer replay is ended (seconds)."""
NICED = (
    f"import os, signal, ssl, sys; os.nice(19); signal.alarm({LONGEST_S + 10.0:.0f}); "
    "ssl._create_default_https_context = ssl._create_unverified_context; "
    "from laps_plan.replay.command import run; sys.exit(run(sys.argv[1], float(sys.argv[2]), as_json=True))"
)
"""Program of the process: ``laps-plan --replay --json``, at the lowest CPU priority. It asks this server only, by an
address that the server's certificate need not name. It ends even if its server is killed."""


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of the request."""

    seconds: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 60.0
    """Length of the replayed period, which ends now (seconds)."""


class Replays:
    """Runs one replay at a time, for all HTTP processes of the server."""

    def __init__(self, url: Callable[[], str], key: Callable[[], str | None], longest_s: float = LONGEST_S) -> None:
        """`url`, `key`: URL and API key of the server itself."""
        self._url, self._key, self._longest_s = url, key, longest_s

    @classmethod
    def of_this_server(cls) -> Replays:
        """Return the replays of the server that this process answers for."""
        from sglang.srt.entrypoints.http_server import get_global_state

        def url() -> str:
            return str(get_global_state().tokenizer_manager.server_args.url())

        return cls(url, lambda: get_serving().admin_api_key or get_serving().api_key)

    async def answer(self, body: bytes) -> tuple[int, bytes]:
        """Run a replay. Return HTTP status and body: 200, 400 for an invalid body, 409 while another replay runs, 503
        if the replay failed (nothing to replay, for example), 504 if the replay took too long."""
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
        # The server's own address is never behind a proxy.
        env = {**os.environ, "no_proxy": "*", **({KEY: key} if key else {})}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=env)
        try:
            out, err = await asyncio.wait_for(process.communicate(), self._longest_s)
        except TimeoutError:
            return error(504, f"the replay took longer than {self._longest_s:g} s")
        finally:
            # Also if the client has disconnected.
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = err.decode(errors="replace").strip().splitlines()
            return error(503, lines[-1] if lines else "the replay failed")
        return 200, out

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock of this server's replays; yield False if another replay holds the lock."""
        # An abstract socket name: one process of the machine can bind the name, and loses the name when it ends.
        with socket.socket(socket.AF_UNIX) as held:
            try:
                held.bind(f"\0laps-replay {self._url()}"[:100])
            except OSError:
                yield False
                return
            yield True


def add(app: FastAPI, replays: Replays) -> None:
    @serve(app, REPLAY_ROUTE, "POST")
    async def laps_replay(request: Request) -> Response:
        """Run the last requests again in the simulator, under other policies and with other knobs."""
        return reply(await replays.answer(await request.body()))
