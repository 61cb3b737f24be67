"""Processes whose imports are done: copies of one process that has imported SGLang and done nothing else.

Nine tenths of a server's start are the imports of its three processes. All that follows them is SGLang's own, in
processes of its own. ``LAPS_COLD_SERVERS=1`` has each process import for itself, as the demo's and the campaign's do.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
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
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lean
import understudies

if TYPE_CHECKING:
    from benchmark.rig.servers import Process

PRELOAD = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.qwen2",
    "fastapi.testclient",
)
ENV = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
COLD = "LAPS_COLD_SERVERS"
EARLY = ("OMP_NUM_THREADS", "MALLOC_", "LD_", "PYTHONUNBUFFERED", "TORCHDYNAMO_", "SGLANG_DISABLED_")
"""Variables that are read while Python starts or SGLang is imported begin so; PYTHONPATH is seen to."""
CHILDREN = 3
"""Of a server: two schedulers, a detokenizer."""
UNSEEN = "sglang.srt.managers.scheduler"
"""Whether a process has imported it tells our plugin whether it runs a scheduler."""
MESSAGE = understudies.MESSAGE


def early(env: Mapping[str, str]) -> dict[str, str]:
    """What imports read."""
    return {name: value for name, value in env.items() if name.startswith(EARLY)}


class Warm:
    """The process that has imported SGLang. It begins with the first copy, and ends with the process that asks."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path, errors: Path | None = None) -> Process:
        """Start Python with ``-m``, ``-c`` or a script; a copy, unless imports would read another environment."""
        cold = COLD in os.environ or lean.GPU.exists()  # CUDA does not survive a fork
        if cold or command[0] != sys.executable or early(env) != early({**os.environ, **ENV}):
            with log.open("ab") as out, (errors or log).open("ab") as err:
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
                )
        if self._control is None:
            self._begin()
        asked = {"argv": command[1:], "env": dict(env), "log": str(log), "errors": str(errors or log)}
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
        assert self._control
        with self._lock, contextlib.suppress(ConnectionError):
            self._control.send(json.dumps(what).encode())
            if answer := self._control.recv(MESSAGE):
                return json.loads(answer)
        raise RuntimeError(f"the process that imports SGLang has ended; {COLD}=1 does without it")

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Nobody waits for it: it ends when the other end of its socket is closed.
            command = [sys.executable, "-W", "ignore", __file__, str(theirs.fileno())]
            env = {**os.environ, **ENV}
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )


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


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Answer until the tests end (None); in a copy of this process, return what it is to be."""
    codes: dict[int, int] = {}

    def reap(*_: Any) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            codes[pid] = os.waitstatus_to_exitcode(status)

    signal.signal(signal.SIGCHLD, reap)
    while text := control.recv(MESSAGE):
        asked = json.loads(text)
        if "poll" in asked:
            control.send(json.dumps(codes.get(asked["poll"])).encode())
            continue
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            return dict(asked)
        control.send(json.dumps(pid).encode())
    return None


def _become(asked: dict[str, Any], given: Mapping[str, str]) -> None:
    os.setsid()
    for path, number in ((asked["log"], 1), (asked["errors"], 2)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    for name in set(given).difference(asked["env"]):
        os.environ.pop(name, None)
    os.environ.update(asked["env"])  # what imports have added stays
    kind, *sys.argv = asked["argv"]
    if kind != "-m" and kind != "-c":
        sys.argv = [kind, *sys.argv]
    sys.path[0] = os.getcwd()
    sys.path[1:1] = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x and x not in sys.path]
    sys.meta_path.insert(0, Unseen(UNSEEN))
    understudies.prepare(CHILDREN)
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(kind, run_name="__main__")


class Unseen(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A module that has been imported, and is not there before somebody imports it."""

    def __init__(self, name: str) -> None:
        self._module = sys.modules.pop(name)
        self._spec = self._module.__spec__

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Once, for its name."""
        if fullname != self._module.__name__:
            return None
        sys.meta_path.remove(self)
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: Any) -> types.ModuleType:
        """As it was."""
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """It has been."""
        module.__spec__ = self._spec


def main() -> None:
    """Import, then serve on the socket whose number is the argument."""
    given = dict(os.environ)
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if asked := _serve(control):
        _become(asked, given)


if __name__ == "__main__":
    main()
