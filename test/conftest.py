"""Fixtures that share one prefill server among all tests with the same setup, and the order of tests for this."""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lean
import pytest
import warm
from hypothesis import HealthCheck, settings
from served import SEVERAL_SERVERS, Prefill, Reference, Setup, SharedServers, make_checkpoint, run_prefill_server

from benchmark.rig import servers

PORTS = 17_280
"""First port of the workers: above the ports that Mooncake chooses, below those of SGLang and ``servers.PORTS``."""
RUN_ALONE = ("test_faults_campaign.py", "test_demo.py", "test_demo_colocated.py")
"""Test files that start several servers."""
DEMOS = "demos"
"""Scope (one process) in which the files of ``RUN_ALONE`` run."""
IN_PROCESS = "server"
"""Folder of tests that import SGLang themselves; they share one process because the import is slow."""


def pytest_configure(config: pytest.Config) -> None:
    """Let servers start without needless imports, as copies of one process. Give each worker its own range of ports,
    apart from the ports of commands that tests start."""
    os.environ.update({**lean.environment(), **warm.ENV})
    os.environ.setdefault("SGLANG_HEALTH_CHECK_TIMEOUT", "120")  # seconds: a busy machine needs them for a token
    os.environ.setdefault(warm.ADDRESS_VARIABLE, f"laps-{uuid.uuid4()}")
    servers.execute = warm.SGLANG.start
    if not lean.GPU.exists():
        sys.path.insert(0, str(lean.NO_GPU))
    # No deadline: an example's time depends on the machine. Same code, same examples, unless LAPS_NEW_EXAMPLES is set.
    settings.register_profile(
        "laps",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="LAPS_NEW_EXAMPLES" not in os.environ,
    )
    settings.load_profile("laps")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops servers before the process ends
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw2").removeprefix("gw"))
    low = PORTS + 1440 * (worker % 3)
    servers.PORTS = (low, low + 1440)


def scope(nodeid: str) -> str:
    """Return the scope of a test from its id: its server or its file. The tests of a scope run in one process."""
    file = nodeid.partition("::")[0]
    if Path(file).name in RUN_ALONE:
        return DEMOS
    if server := re.search(r"@([\w-]+)\]$", nodeid):
        return server[1]
    return IN_PROCESS if Path(file).parent.name == IN_PROCESS else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives scopes to the workers in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False
    return ByScope(config, log)


def setup_of(item: pytest.Item) -> Setup | None:
    """Return the setup of the server on which a test runs; None if it needs no server."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    found = params.get("prefill")
    return found if isinstance(found, Setup) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: tests with several servers first because these take longest, then the demos, then server after
    server (those with most tests first), then tests without a server.

    xdist assigns the next scope while the last one still has two tests; small scopes at the end keep all workers busy.
    """
    scopes, setups = [scope(item.nodeid) for item in items], [setup_of(item) for item in items]
    count = Counter(scopes)
    first = {setup: i for i, setup in reversed(list(enumerate(setups)))}

    longest = {SEVERAL_SERVERS: 0, DEMOS: 1}

    def key(i: int) -> tuple[int, bool, int, str, int, int]:
        setup, rank = setups[i], longest.get(scopes[i], 2)
        if setup is None:
            return rank, True, 0, "", 0, i
        return rank, False, -count[scopes[i]], scopes[i], first[setup], i

    items[:] = [items[i] for i in sorted(range(len(items)), key=key)]


@pytest.fixture(scope="session")
def shared_servers() -> Iterator[SharedServers]:
    """Provide servers that run beside the prefill server."""
    running = SharedServers()
    yield running
    running.close()


@pytest.fixture(scope="session")
def prefill(
    request: pytest.FixtureRequest, shared_servers: SharedServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prefill]:
    """Provide the running server that the test's marks name."""
    setup: Setup = request.param
    shared_servers.switch_to_group(setup.group or setup.name)
    with run_prefill_server(setup, tmp_path_factory.mktemp(setup.name)) as running:
        yield running


@pytest.fixture
def clean(prefill: Prefill) -> Iterator[None]:
    """Require after the test that the server is unharmed."""
    yield
    prefill.require_unharmed()


@pytest.fixture(scope="session")
def references() -> dict[Path, Reference]:
    """Provide the references made so far, by checkpoint."""
    return {}


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all processes of the run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture
def reference(prefill: Prefill, references: dict[Path, Reference], run_folder: Path) -> Reference:
    """Provide the server's model under transformers."""
    folder = make_checkpoint(prefill.setup.shape)
    if folder not in references:
        references[folder] = Reference(folder, run_folder / "references")
    return references[folder]


@pytest.fixture(autouse=True)
def _numbers_next_to_zero() -> Iterator[None]:
    """Keep denormal numbers for other tests: the host platform flushes them once SGLang's model runner is imported."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)
