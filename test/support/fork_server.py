"""Process that has imported SGLang and done nothing else; its copies run commands. ``warm`` starts this process."""

from __future__ import annotations

import ctypes
import gc
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Mapping
from typing import Any

import lean
import prefork
from prefork import MAX_MESSAGE_BYTES

PRELOAD = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    *(f"sglang.srt.models.{name}" for name in lean.MODELS if name not in lean.LATE_IMPORTS),
    "fastapi.testclient",
)
CHILDREN = 3
"""Child processes that a server can need: two schedulers and a detokenizer."""
HIDDEN_MODULE = "sglang.srt.managers.scheduler"
"""Module that only processes with a scheduler have imported; the plugin checks for this module."""


PR_SET_CHILD_SUBREAPER = 36


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Answer clients until the last one disconnects (returns None). In a fork, return the command that it must run."""
    codes: dict[int, int] = {}
    clients: list[socket.socket] = []

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
    while True:
        for ready in select.select([listener, *clients], [], [])[0]:
            if ready is listener:
                clients.append(listener.accept()[0])
                clients[-1].send(b"ready")
                continue
            try:
                request = json.loads(ready.recv(MAX_MESSAGE_BYTES) or b"null")
                if request is None:
                    raise ConnectionResetError
                if "poll" in request:
                    ready.send(json.dumps(codes.get(request["poll"])).encode())
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for inherited in (listener, *clients):
                        inherited.close()
                    return dict(request)
                ready.send(json.dumps(pid).encode())
            except ConnectionError:
                clients.remove(ready)
                ready.close()
                if not clients:
                    return None


def _run_command(request: dict[str, Any], initial_env: Mapping[str, str]) -> None:
    os.setsid()
    with open(request["log"], "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if request["errors"]:
        with open(request["errors"], "wb") as errors:
            os.dup2(errors.fileno(), 2)
    for name in set(initial_env).difference(request["env"]):
        os.environ.pop(name, None)
    os.environ.update(request["env"])  # keeps variables that imports have set
    lean.keep_memory(os.environ)
    os.chdir(request["cwd"])
    sys.path[0] = os.getcwd()
    sys.path[1:1] = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x and x not in sys.path]
    sys.meta_path.insert(0, HiddenModule(HIDDEN_MODULE))
    prefork.fork_in_advance(CHILDREN)
    kind, *rest = request["argv"]
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = [kind, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


class HiddenModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that hides an imported module from ``sys.modules`` until code imports the module again."""

    def __init__(self, name: str) -> None:
        self._module = sys.modules.pop(name)
        package, _, last = name.rpartition(".")
        delattr(sys.modules[package], last)  # the import system sets it again
        self._spec = self._module.__spec__

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find the hidden module, once."""
        if fullname != self._module.__name__:
            return None
        sys.meta_path.remove(self)
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return the hidden module, unchanged."""
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has been executed."""
        module.__spec__ = self._spec


def main() -> None:
    """Import, then serve on the socket whose number is the argument."""
    initial_env = dict(os.environ)
    listener = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    # Orphans become children of this process, which reaps them at once; pid 1 can take longer.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if request := _serve(listener):
        _run_command(request, initial_env)


if __name__ == "__main__":
    main()
