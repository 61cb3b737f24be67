"""Processes whose imports are done: copies of one process that has imported SGLang and done nothing else.

Nine tenths of a server's start are the imports of its three processes. All that follows them is SGLang's own, in
processes of its own. ``LAPS_COLD_SERVERS=1`` has each process import for itself, as the demo's and the campaign's do.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lean
from understudies import MESSAGE

from benchmark.rig import servers

ENV = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
COLD = "LAPS_COLD_SERVERS"
EARLY = ("OMP_NUM_THREADS", "MALLOC_", "LD_", "PYTHONUNBUFFERED", "TORCHDYNAMO_", "SGLANG_DISABLED_")
"""Variables that are read while Python starts or SGLang is imported begin so; PYTHONPATH is seen to."""
ORIGINAL = Path(__file__).with_name("original.py")


def early(env: Mapping[str, str]) -> dict[str, str]:
    """What imports read."""
    return {name: value for name, value in env.items() if name.startswith(EARLY)}


class Warm:
    """The process that has imported SGLang. It begins with the first copy, and ends with the process that asks."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, errors: Path | None = None
    ) -> servers.Process:
        """Start Python with ``-m``, ``-c`` or a script; a copy, unless imports would read another environment."""
        cold = COLD in os.environ or lean.GPU.exists()  # CUDA does not survive a fork
        if cold or command[0] != sys.executable or early(env) != early({**os.environ, **ENV}):
            return servers.execute(command, env, log, errors)
        asked = {"argv": command[1:], "env": dict(env), "log": str(log), "errors": str(errors) if errors else None}
        return Started(self, self.ask(asked))

    def run(
        self, *command: str, timeout: float = 200.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """``subprocess.run`` of Python with these arguments. Raises TimeoutExpired after ``timeout`` s."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            process = self.start((sys.executable, *command), {**os.environ, **ENV, **(env or {})}, out, err)
            try:
                code = process.wait(timeout)
            finally:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
            return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())

    def ask(self, what: Any) -> Any:
        """One question and its answer. Raises RuntimeError where nobody answers."""
        with self._lock, contextlib.suppress(ConnectionError):
            self._control = control = self._control or self._begin()
            control.send(json.dumps(what).encode())
            if answer := control.recv(MESSAGE):
                return json.loads(answer)
        raise RuntimeError(f"the process that imports SGLang has ended; {COLD}=1 does without it")

    def _begin(self) -> socket.socket:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Nobody waits for it: it ends when the other end of its socket is closed.
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", ORIGINAL, str(theirs.fileno())],
                env={**os.environ, **ENV}, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        return control


SGLANG = Warm()
"""Of this process."""


class Started:
    """A process, as ``subprocess.Popen`` shows one."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = self._warm.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises TimeoutExpired after ``timeout`` s."""
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or math.inf)
            time.sleep(0.02)
        return code
