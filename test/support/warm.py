"""Processes that start with their imports done: forks of one process that has only imported SGLang.

The imports of a server's three processes take nine tenths of its start. After the imports a fork runs SGLang's own
code. ``LAPS_COLD_SERVERS=1`` makes each process import for itself; another value does so for the commands with this
value as an argument.

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
from prefork import MAX_MESSAGE_BYTES

from benchmark.rig import servers
from benchmark.rig.servers import execute

ENV = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
COLD_VARIABLE = "LAPS_COLD_SERVERS"
ADDRESS_VARIABLE = "LAPS_WARM_ADDRESS"
"""Environment variable with the socket address of the fork server, which all processes of a test run share."""
MAX_TRIES = 5
HERE = Path(__file__).parent
IMPORT_VARIABLES = ("OMP_NUM_THREADS", "LD_", "PYTHONUNBUFFERED", "TORCHDYNAMO_", "SGLANG_DISABLED_")
"""Prefixes of variables that are read at Python's start or SGLang's import. Copies handle PYTHONPATH themselves."""
FORK_SERVER = HERE / "fork_server.py"


def import_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``env`` that are read by imports."""
    return {name: value for name, value in env.items() if name.startswith(IMPORT_VARIABLES)}


def benchmark_command(module: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment to run a benchmark whose servers start as copies."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return [sys.executable, "-m", "warm", module], {**os.environ, "PYTHONPATH": path}


class ForkServerClient:
    """Client of the process that has imported SGLang. The process starts at first use and ends with its last client."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, errors: Path | None = None
    ) -> servers.Process:
        """Start Python with ``-m``, ``-c`` or a script: as a copy, unless imports would see another environment."""
        cold = os.environ.get(COLD_VARIABLE) in ("1", *command) or lean.GPU.exists()  # CUDA does not survive a fork
        if cold or command[0] != sys.executable or import_variables(env) != import_variables({**os.environ, **ENV}):
            return execute(command, env, log, errors)
        files = {"log": str(log.absolute()), "errors": str(errors.absolute()) if errors else None}
        return ForkedProcess(
            self, self.send_request({"argv": command[1:], "env": dict(env), "cwd": os.getcwd(), **files})
        )

    def run(
        self, *command: str, timeout: float = 500.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments, like ``subprocess.run``. Raises TimeoutExpired after ``timeout`` s."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            process = self.start((sys.executable, *command), {**os.environ, **ENV, **(env or {})}, out, err)
            try:
                code = process.wait(timeout)
            finally:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
            return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())

    def send_request(self, request: Any) -> Any:
        """Send a request to the fork server and return its answer. Raises RuntimeError if no fork server answers."""
        with self._lock, contextlib.suppress(ConnectionError):
            self._control = control = self._control or self._connect()
            control.send(json.dumps(request).encode())
            if answer := control.recv(MAX_MESSAGE_BYTES):
                return json.loads(answer)
        raise RuntimeError(f"the process that imports SGLang has ended; {COLD_VARIABLE}=1 does without it")

    def _connect(self) -> socket.socket:
        address = "\0" + os.environ.setdefault(ADDRESS_VARIABLE, f"laps-{uuid.uuid4()}")
        for _ in range(MAX_TRIES):  # the previous fork server may be about to end
            self._start_server(address)
            control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.suppress(ConnectionError):
                control.connect(address)
                if control.recv(MAX_MESSAGE_BYTES):
                    return control
            control.close()
            time.sleep(0.1)
        raise RuntimeError(f"the process that imports SGLang does not start; {COLD_VARIABLE}=1 does without it")

    def _start_server(self, address: str) -> None:
        """Start the fork server, unless another process has bound its address."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError:
                return
            listener.listen()
            # Not waited for: the fork server ends when its last client disconnects.
            descriptor = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", FORK_SERVER, str(descriptor)],
                env={**os.environ, **ENV}, stdin=subprocess.DEVNULL, pass_fds=[descriptor], start_new_session=True,
            )  # fmt: skip


SGLANG = ForkServerClient()
"""Client that this process uses."""


class ForkedProcess:
    """Copy that was started, with the interface of ``subprocess.Popen``."""

    def __init__(self, warm: ForkServerClient, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self.returncode is None:
            self.returncode = self._warm.send_request({"poll": self.pid})
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
    """Run a module so that the servers and routers that it starts are copies.

    Their PYTHONPATH lacks this folder, because the folder contains a plugin of SGLang (``graph_tape``) for some tests.
    """
    path = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x and Path(x).resolve() != HERE.resolve()]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    servers.execute = SGLANG.start
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
