"""Worker processes behind one port (--router-workers), each a router of its own; their parent restarts them."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
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
"""Delay before a worker that has ended is restarted (seconds)."""
BACKLOG = 2048
"""Connections that wait for a worker to accept them, as in uvicorn."""
BEAT_S = 0.5
"""Period of a worker's heartbeats, sent from its event loop (seconds)."""
HUNG_S = 20.0
"""A worker without a heartbeat for this long is killed and restarted (seconds)."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def listen(host: str, port: int, n: int) -> list[socket.socket]:
    """Return ``n`` sockets on one port, among which the kernel distributes connections. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # With SO_REUSEPORT the probe would not notice other programs that share the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        port = probe.getsockname()[1]
    return [
        socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=False)
        for _ in range(n)
    ]


def listen_alone(n: int) -> list[socket.socket]:
    """Return a socket on a loopback port for each of ``n`` workers. Raises OSError."""
    return [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]


class Processes:
    """Runs one process for each list of sockets. The sockets stay open here, so that no connection is refused while a
    worker restarts."""

    def __init__(
        self,
        sockets: Sequence[Sequence[socket.socket]],
        serve: Callable[[int, Callable[[], None]], None],
        hung_s: float = HUNG_S,
    ) -> None:
        """``serve(i, beat)`` runs worker ``i``, which calls ``beat`` every BEAT_S, until it returns or SIGTERM comes.
        ``hung_s``: time without a heartbeat after which a worker is killed (seconds)."""
        self._sockets = sockets
        self._hung_looks = math.ceil(hung_s / BEAT_S)
        self._beats = mmap.mmap(-1, max(1, len(sockets)))
        """Heartbeat counter of each worker, in shared memory."""
        self._seen: dict[int, tuple[int, int]] = {}
        """Last counter seen and the number of checks since then that found it unchanged, by process id."""
        self._serve = serve
        self._running: dict[int, int] = {}
        """Index of each worker, by process id."""
        self._told: int | None = None
        """The first stop signal received."""
        self._read_end, self._write_end = os.pipe()
        """The write end closes when this process ends, however it does; workers wait for that at the read end."""

    def run(self) -> None:
        """Run until all workers have ended after a stop signal, then raise that signal in this process, too."""
        before = {s: signal.signal(s, self._end) for s in ENDING}
        for i in range(len(self._sockets)):
            self._start(i)
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                self._kill_hung()
                # Signals are handled during the sleep.
                time.sleep(BEAT_S)
                continue
            self._seen.pop(pid, None)
            index = self._running.pop(pid, None)
            if index is None or self._told:
                continue
            logger.error("worker %d has ended (%d); restarting it", index, os.waitstatus_to_exitcode(status))
            time.sleep(PAUSE_S)
            self._start(index)
        for s, handler in before.items():
            signal.signal(s, handler)
        if self._told:
            signal.raise_signal(self._told)

    def _kill_hung(self) -> None:
        """Kill workers without heartbeats. Checks are counted, not seconds: after this process itself was suspended,
        its workers' heartbeats only look old."""
        for pid, index in () if self._told else list(self._running.items()):
            beat, (before, looks) = self._beats[index], self._seen.get(pid, (-1, 0))
            self._seen[pid] = beat, looks + 1 if beat == before else 0
            if looks >= self._hung_looks:
                logger.error("worker %d hangs; killing it", index)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _end(self, number: int, _: FrameType | None) -> None:
        """Forward a signal to the workers; as in uvicorn, a second SIGINT ends them in the middle of their requests."""
        if not self._told:
            self._told = number
            for each in (s for both in self._sockets for s in both):
                each.close()
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _start(self, index: int) -> None:
        # Blocked, so that no signal arrives between the fork and the entry in _running.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        pid = 0 if self._told else os.fork()
        if pid:
            self._running[pid] = index
        elif not self._told:
            self._work(index)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def _work(self, index: int) -> None:
        """Run worker ``index`` in the new process, and exit."""

        def beat() -> None:
            self._beats[index] = (self._beats[index] + 1) % 256

        code = 1
        try:
            # A terminal's Ctrl-C goes to the parent, which forwards it.
            os.setpgid(0, 0)
            for s in ENDING:
                signal.signal(s, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            os.close(self._write_end)
            for theirs in (s for i, each in enumerate(self._sockets) if i != index for s in each):
                theirs.close()
            threading.Thread(target=self._end_with_parent, daemon=True).start()
            self._serve(index, beat)
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
        except BaseException:
            logger.exception("worker %d failed", index)
        finally:
            logging.shutdown()
            sys.stdout.flush()
            # Skips the exit handlers, which belong to the parent.
            os._exit(code)

    def _end_with_parent(self) -> None:
        os.read(self._read_end, 1)
        os.kill(os.getpid(), signal.SIGTERM)
