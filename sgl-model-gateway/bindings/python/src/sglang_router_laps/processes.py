"""Several processes behind one port, each a router of its own (--router-workers); their parent keeps them running."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Before a worker that has ended is started again (seconds)."""
BACKLOG = 2048
"""Connections that wait for a worker, as in uvicorn."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def listen(host: str, port: int, n: int) -> list[socket.socket]:
    """``n`` sockets on one port, among which the kernel shares out connections. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Others that share their port as well would not be noticed.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        port = probe.getsockname()[1]
    return [
        socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=False)
        for _ in range(n)
    ]


def listen_alone(n: int) -> list[socket.socket]:
    """A socket on a loopback port for each of ``n`` workers. Raises OSError."""
    return [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]


class Processes:
    """One process for each list of sockets. The sockets stay open here, so that none who has connected is turned away
    while a worker is started again."""

    def __init__(self, sockets: Sequence[Sequence[socket.socket]], serve: Callable[[int], None]) -> None:
        """``serve`` is called in worker ``i`` with ``i``, and ends with it, or at SIGTERM."""
        self._sockets = sockets
        self._serve = serve
        self._running: dict[int, int] = {}
        """Workers by process id."""
        self._told: int | None = None
        """The first signal to end."""
        self._read_end, self._write_end = os.pipe()
        """Its other end closes when this process ends, however it does."""

    def run(self) -> None:
        """Return when all have ended, after a signal that this process is left to die of as well."""
        before = {s: signal.signal(s, self._end) for s in ENDING}
        for i in range(len(self._sockets)):
            self._start(i)
        while self._running:
            pid, status = os.wait()
            index = self._running.pop(pid, None)
            if index is None or self._told:
                continue
            logger.error("worker %d has ended (%d); it starts again", index, os.waitstatus_to_exitcode(status))
            time.sleep(PAUSE_S)
            self._start(index)
        for s, handler in before.items():
            signal.signal(s, handler)
        if self._told:
            signal.raise_signal(self._told)

    def _end(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on; a second SIGINT ends workers in the middle of their requests, as it does uvicorn."""
        if not self._told:
            self._told = number
            for each in (s for both in self._sockets for s in both):
                each.close()
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _start(self, index: int) -> None:
        # A signal between the fork and the note of it would not be passed on.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        pid = 0 if self._told else os.fork()
        if pid:
            self._running[pid] = index
        elif not self._told:
            self._work(index)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def _work(self, index: int) -> None:
        """All that the new process does."""
        code = 1
        try:
            # A terminal's Ctrl-C is for the parent, which passes it on.
            os.setpgid(0, 0)
            for s in ENDING:
                signal.signal(s, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            os.close(self._write_end)
            for theirs in (s for i, each in enumerate(self._sockets) if i != index for s in each):
                theirs.close()
            threading.Thread(target=self._end_with_parent, daemon=True).start()
            self._serve(index)
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
        except BaseException:
            logger.exception("worker %d failed", index)
        finally:
            logging.shutdown()
            sys.stdout.flush()
            # What the parent would do at its end is not this process's to do.
            os._exit(code)

    def _end_with_parent(self) -> None:
        os.read(self._read_end, 1)
        os.kill(os.getpid(), signal.SIGTERM)
