"""Preforked processes, which ``multiprocessing`` uses instead of spawning new ones.

A process forked after nothing but imports equals a new interpreter after the same imports. When no
preforked process is left, ``multiprocessing`` spawns as usual.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from multiprocessing import context, forkserver, popen_fork, popen_forkserver, popen_spawn_posix, reduction, spawn, util
from multiprocessing import resource_tracker as tracker
from typing import Any

MAX_MESSAGE_BYTES = 1 << 17
"""Most bytes of a message, more than any environment has."""
MAX_FDS = 64
DATA_PARALLEL_CHILDREN = 2
"""Number of preforked processes that SGLang's data parallel controller gets for its children, the schedulers."""
_idle: list[tuple[int, socket.socket]] = []


def fork_in_advance(count: int) -> None:
    """Fork ``count`` processes and make ``multiprocessing`` use these for its next processes."""
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for _, other in _idle:
                other.close()
            _idle.clear()
            _run_process(theirs)
        theirs.close()
        _idle.append((pid, ours))
    context.SpawnProcess._Popen = staticmethod(_start)  # type: ignore[method-assign, assignment]


def _start(process: Any) -> Any:
    return _Popen(process) if _idle else popen_spawn_posix.Popen(process)


def _run_process(stage: socket.socket) -> None:
    """Wait for a pickled process, run it and exit. Exit without one when the parent ends."""
    message, fds, _, _ = socket.recv_fds(stage, MAX_MESSAGE_BYTES, MAX_FDS)
    if not fds:
        os._exit(0)
    env, children = json.loads(message)
    os.environ.clear()
    os.environ.update(env)
    fork_in_advance(children)
    part, tracker._resource_tracker._fd, *inherited = fds  # type: ignore[attr-defined]
    forkserver._forkserver._inherited_fds = inherited  # type: ignore[attr-defined]
    sys.exit(spawn._main(part, stage.fileno()))  # type: ignore[attr-defined]


class _Popen(popen_fork.Popen):
    """Process of ``multiprocessing`` that runs in a preforked process."""

    method = "spawn"
    DupFd = popen_forkserver._DupFd  # type: ignore[attr-defined]

    def __init__(self, process: Any) -> None:
        self._fds: list[int] = []
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        """Pass ``fd`` to the child and return the index by which the child finds it."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process: Any) -> None:
        text = io.BytesIO()
        context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            reduction.dump(spawn.get_preparation_data(process._name), text)
            reduction.dump(process, text)
        finally:
            context.set_spawning_popen(None)
        part = os.memfd_create("part")
        os.write(part, text.getbuffer())
        os.lseek(part, 0, os.SEEK_SET)
        self.pid, stage = _idle.pop(0)
        children = DATA_PARALLEL_CHILDREN if "data_parallel" in getattr(process._target, "__name__", "") else 0
        message = json.dumps((dict(os.environ), children)).encode()
        socket.send_fds(stage, [message], [part, tracker.getfd(), *self._fds])  # type: ignore[list-item]
        os.close(part)
        self.sentinel = stage.detach()
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))
