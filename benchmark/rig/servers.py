"""Real SGLang servers and routers as child processes on loopback, stopped with all their children."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

HOST = "127.0.0.1"
PORTS = (30100, 32700)
"""Range of ports to choose from. An SGLang server takes ports from 22000 to 29999 by itself, often before another
server listens on its chosen port."""
STREET = 240
"""Length of a stretch of ports. Ports are chosen from every second stretch: with data-parallel attention, a server
takes up to a dozen more ports by itself, from 233 after its HTTP port on."""
_handed_out: set[int] = set()

ENV = {
    "SGLANG_HOST_IP": HOST,
    "MC_FORCE_TCP": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Variables that keep large tensors in glibc's heap. By default glibc returns the memory to the system, and every step
faults it in again, so a slightly larger chunk can take twice as long. No device does that."""
COMMON = ("--host", HOST, "--dtype", "float32", "--log-level-http", "warning")
SLEEPS = "--sleep-on-idle"
"""Flag of servers that sleep while idle, for a second at most, and leave the cores to other processes."""


class Process(Protocol):
    """Used part of ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises TimeoutExpired after ``timeout`` s."""


def execute(command: Sequence[str], env: Mapping[str, str], log: Path, errors: Path | None = None) -> Process:
    """Start a process with its output in ``log``, and stderr in ``errors``, if given."""
    with log.open("wb") as out, errors.open("wb") if errors else nullcontext(subprocess.STDOUT) as err:
        # The child gets its own session, so that Ctrl-C reaches only this process, which then stops the child.
        return subprocess.Popen(
            command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )


class ServerError(RuntimeError):
    """A server did not start, or died. The message is one line and names its log."""


@dataclass
class Server:
    """One child process and its children. Use as a context manager, or call stop()."""

    name: str
    command: Sequence[str]
    port: int
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    process: Process | None = None
    bootstrap_port: int | None = None
    """Bootstrap port of a prefill server."""
    key: str | None = None
    """Key for the rig's own requests: the server's --admin-api-key, a router's --api-key; None if none is needed."""

    @property
    def url(self) -> str:
        """Return the base URL, without a slash at its end."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> Server:
        """Start the process. Raises ServerError if its port is taken."""
        require_free(self.port, self.name)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **ENV, **self.env}
        self.process = execute(self.command, env, self.log)
        return self

    def ready(self, timeout_s: float = 240.0, tick: Callable[[], None] | None = None) -> Server:
        """Wait until the health route answers 200. Raises ServerError if the server ends or takes too long."""
        begin = time.monotonic()
        while True:
            waited = time.monotonic() - begin
            if not self.alive():
                code = self.process and self.process.returncode
                raise ServerError(f"{self.name} ended with code {code} while starting: {self.last_line()}")
            if waited > timeout_s:
                raise ServerError(f"{self.name} did not answer within {timeout_s:.0f} s; its log: {self.log}")
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=10) as reply:
                if reply.status == 200:
                    return self
            if tick:
                tick()
            time.sleep(0.2)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def laps_status(self) -> dict[str, Any]:
        """Return the answer to GET /laps_status. Raises OSError, ValueError."""
        asked = urllib.request.Request(self.url + "/laps_status", headers=bearer(self.key))
        with urllib.request.urlopen(asked, timeout=60) as reply:
            status: dict[str, Any] = json.load(reply)
        return status

    def last_line(self) -> str:
        """Return the last line of the log that looks like an error, else its last line."""
        lines = [x for x in self.log.read_text(errors="replace").splitlines() if x.strip()]
        told = [x for x in lines if "Error" in x or "error:" in x]
        return (told or lines or ["its log is empty"])[-1][-300:]

    def family(self) -> list[psutil.Process]:
        """Return the process and all its descendants."""
        if not self.process:
            return []
        try:
            top = psutil.Process(self.process.pid)
            return [*top.children(recursive=True), top]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kill the process and its children, like a crash."""
        self._end(signal.SIGKILL, 5.0)

    def stop(self) -> None:
        """End the process and its children; harmless if it is gone."""
        self._end(signal.SIGTERM, 10.0)

    def _end(self, first: signal.Signals, grace_s: float) -> None:
        members = self.family()
        for p in members if first == signal.SIGKILL else members[-1:]:
            with contextlib.suppress(psutil.Error):
                p.send_signal(first)
        _, left = psutil.wait_procs(members, timeout=grace_s)
        for p in left:
            with contextlib.suppress(psutil.Error):
                p.kill()
        psutil.wait_procs(left, timeout=5.0)
        if self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)

    def __enter__(self) -> Server:
        return self if self.process else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def log_of(out: Path, name: str) -> Path:
    """Return the path of a server's log in a folder of results."""
    return out / "logs" / f"{name.replace(', ', '-').replace(' ', '-')}.log"


def bearer(key: str | None) -> dict[str, str]:
    """Return the authorization header for ``key``."""
    return {"authorization": f"Bearer {key}"} if key else {}


def free_port() -> int:
    """Return a port that is free now and was not returned before.

    The port is below the ephemeral ports: servers start seconds after their port was chosen, and meanwhile SGLang and
    Mooncake open hundreds of sockets.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        if port in _handed_out or port % (2 * STREET) not in range(STREET - 233, STREET - 12):
            continue
        _handed_out.add(port)
        with contextlib.suppress(ServerError):
            require_free(port, "server")
            return port


def require_free(port: int, name: str) -> None:
    """Raise ServerError if ``port`` is in use."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((HOST, port))
        except OSError:
            raise ServerError(f"port {port} (for the {name}) is already taken on {HOST}") from None


def sglang(
    mode: str,
    model: Path,
    log: Path,
    *args: str,
    env: Mapping[str, str] | None = None,
    name: str = "",
    sleeps: bool = True,
) -> Server:
    """Return a server (not started). ``mode``: prefill or decode, one half of a disaggregated pair; null for a server
    that does both. ``args``: SGLang's options; ``sleeps``: True to add SLEEPS."""
    port, bootstrap = free_port(), free_port() if mode == "prefill" else None
    command = (
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port), *COMMON,
        *([SLEEPS] * sleeps),
        *(("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake") if mode != "null" else ()),
        *(("--disaggregation-bootstrap-port", str(bootstrap)) if bootstrap else ()), *args,
    )  # fmt: skip
    return Server(name or f"{mode} server", command, port, log, env=dict(env or {}), bootstrap_port=bootstrap)


prefill, decode, colocated = (partial(sglang, mode) for mode in ("prefill", "decode", "null"))


def minilb(
    prefills: Sequence[Server],
    decodes: Sequence[Server],
    log: Path,
    *args: str,
    module: str = "sglang_router.launch_router",
    name: str = "router",
    mini: bool = True,
) -> Server:
    """Return MiniLB (not started) for running servers; SGLang's Rust gateway if not ``mini``."""
    port = free_port()
    command = [sys.executable, "-m", module, "--pd-disaggregation", "--host", HOST, "--port", str(port)]
    for p in prefills:
        command += ["--prefill", p.url, str(p.bootstrap_port)]
    for d in decodes:
        command += ["--decode", d.url]
    command += ["--mini-lb"] if mini else ["--prometheus-host", HOST, "--prometheus-port", str(free_port())]
    return Server(name, [*command, *args], port, log)


gateway = partial(minilb, mini=False)


@contextlib.contextmanager
def running(*servers: Server, say: Callable[[str], None] = lambda _: None) -> Iterator[tuple[Server, ...]]:
    """Start all servers, wait until they are ready, and stop them on exit: all, also if a stop is interrupted."""
    with contextlib.ExitStack() as stops:
        for s in servers:
            stops.callback(s.stop)
        stops.callback(say, "stopping the servers")
        for s in servers:
            s.start()
        for s in servers:
            s.ready(tick=partial(say, f"starting the {s.name}"))
        yield servers
