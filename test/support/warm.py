"""Processes whose imports are done: copies of one process that has imported SGLang and done nothing else.

Nine tenths of a server's start are the imports of its three processes. All that follows them is SGLang's own, in
processes of its own. ``LAPS_COLD_SERVERS=1`` has each process import for itself; with a word of a command line in the
place of the 1, those processes that have it.

    PYTHONPATH=test/support python -m warm MODULE ARGUMENTS      # a benchmark whose servers and routers start so
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lean
from understudies import MESSAGE

from benchmark.rig import servers
from benchmark.rig.servers import execute

ENV = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
COLD = "LAPS_COLD_SERVERS"
ADDRESS = "LAPS_WARM_ADDRESS"
"""Variable with the name of the socket on which the original serves: all processes of a test run share one."""
TRIES = 5
HERE = Path(__file__).parent
EARLY = ("OMP_NUM_THREADS", "LD_", "PYTHONUNBUFFERED", "TORCHDYNAMO_", "SGLANG_DISABLED_")
"""Variables that are read while Python starts or SGLang is imported begin so; PYTHONPATH is seen to."""
ORIGINAL = HERE / "original.py"


def early(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that imports read."""
    return {name: value for name, value in env.items() if name.startswith(EARLY)}


def benchmark(module: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run a benchmark whose servers start as copies."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return [sys.executable, "-m", "warm", module], {**os.environ, "PYTHONPATH": path}


class Warm:
    """The process that has imported SGLang. It begins with the first copy, and ends with the last one that asks."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, errors: Path | None = None
    ) -> servers.Process:
        """Start Python with ``-m``, ``-c`` or a script; a copy, unless imports would read another environment."""
        cold = os.environ.get(COLD) in ("1", *command) or lean.GPU.exists()  # CUDA does not survive a fork
        if cold or command[0] != sys.executable or early(env) != early({**os.environ, **ENV}):
            return execute(command, env, log, errors)
        files = {"log": str(log.absolute()), "errors": str(errors.absolute()) if errors else None}
        return Started(self, self.ask({"argv": command[1:], "env": dict(env), "cwd": os.getcwd(), **files}))

    def run(
        self, *command: str, timeout: float = 500.0, env: Mapping[str, str] | None = None
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
            self._control = control = self._control or self._join()
            control.send(json.dumps(what).encode())
            if answer := control.recv(MESSAGE):
                return json.loads(answer)
        raise RuntimeError(f"the process that imports SGLang has ended; {COLD}=1 does without it")

    def _join(self) -> socket.socket:
        address = "\0" + os.environ.setdefault(ADDRESS, f"laps-{uuid.uuid4()}")
        for _ in range(TRIES):  # it may just be ending
            self._begin(address)
            control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.suppress(ConnectionError):
                control.connect(address)
                if control.recv(MESSAGE):
                    return control
            control.close()
            time.sleep(0.1)
        raise RuntimeError(f"the process that imports SGLang does not start; {COLD}=1 does without it")

    def _begin(self, address: str) -> None:
        """Start it, unless somebody has."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError:
                return
            listener.listen()
            # Nobody waits for it: it ends when nobody is connected any more.
            theirs = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", ORIGINAL, str(theirs)],
                env={**os.environ, **ENV}, stdin=subprocess.DEVNULL, pass_fds=[theirs], start_new_session=True,
            )  # fmt: skip


SGLANG = Warm()
"""The original of this process."""


class Started:
    """A process, as ``subprocess.Popen`` shows one."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        """Return the exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = self._warm.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises TimeoutExpired after ``timeout`` s."""
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or math.inf)
            time.sleep(0.02)
        return code


def main() -> None:
    """Run a module; the servers and routers that it starts are copies.

    This folder leaves their path: a plugin of SGLang lies here (``graph_tape``) that only some tests ask for.
    """
    path = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x and Path(x).resolve() != HERE.resolve()]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    servers.execute = SGLANG.start
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
