"""One prefill server at a time for all tests that name the same one, and the order of tests that makes it so."""

from __future__ import annotations

import os
import re
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
from served import SEVERAL, Beside, Prefill, Reference, Setup, checkpoint, started

from benchmark.rig import servers

PORTS = 17_280
"""Above those that Mooncake takes by itself, below those of SGLang and of ``servers.PORTS``."""
BY_THEMSELVES = ("test_faults_campaign.py", "test_demo.py", "test_demo_colocated.py")
"""Test files that start several servers."""
DEMOS = "demos"
"""The process that they run in."""
IN_PROCESS = "server"
"""Folder of tests that import SGLang themselves: in one process, for that takes its time."""


def pytest_configure(config: pytest.Config) -> None:
    """Servers start lean, as copies of one process; workers choose ports apart from each other, and from the commands
    that tests start."""
    os.environ.update({**lean.environment(), **warm.ENV})
    os.environ.setdefault("SGLANG_HEALTH_CHECK_TIMEOUT", "120")  # seconds, in which a busy machine generates a token
    os.environ.setdefault(warm.ADDRESS, f"laps-{uuid.uuid4()}")
    servers.execute = warm.SGLANG.start
    if not lean.GPU.exists():
        sys.path.insert(0, str(lean.NO_GPU))
    # How long an example takes is the machine's affair; and the same code has the same result each time, unless asked.
    settings.register_profile(
        "laps",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="LAPS_NEW_EXAMPLES" not in os.environ,
    )
    settings.load_profile("laps")
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    low = PORTS + 1440 * (worker % 3)
    servers.PORTS = (low, low + 1440)


def scope(nodeid: str) -> str:
    """Return what runs in one process, from a test's id: the tests of a server, or of a file."""
    file = nodeid.partition("::")[0]
    if Path(file).name in BY_THEMSELVES:
        return DEMOS
    if server := re.search(r"@([\w-]+)\]$", nodeid):
        return server[1]
    return IN_PROCESS if Path(file).parent.name == IN_PROCESS else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Scopes go to the workers in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False
    return ByScope(config, log)


def setup_of(item: pytest.Item) -> Setup | None:
    """The server that a test runs on."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    found = params.get("prefill")
    return found if isinstance(found, Setup) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: what starts several servers first, for it takes longest, then the demos; then server after
    server; then what needs none.

    xdist gives a process its next scope while the last one still has two tests: small scopes at the end keep both busy.
    """
    scopes, setups = [scope(item.nodeid) for item in items], [setup_of(item) for item in items]
    count = Counter(scopes)
    first = {setup: i for i, setup in reversed(list(enumerate(setups)))}

    longest = {SEVERAL: 0, DEMOS: 1}

    def key(i: int) -> tuple[int, bool, int, str, int, int]:
        setup, rank = setups[i], longest.get(scopes[i], 2)
        if setup is None:
            return rank, True, 0, "", 0, i
        return rank, False, -count[scopes[i]], scopes[i], first[setup], i

    items[:] = [items[i] for i in sorted(range(len(items)), key=key)]


@pytest.fixture(scope="session")
def beside() -> Iterator[Beside]:
    """Servers that run beside the prefill server."""
    running = Beside()
    yield running
    running.close()


@pytest.fixture(scope="session")
def prefill(
    request: pytest.FixtureRequest, beside: Beside, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prefill]:
    """The server that the test's marks name."""
    setup: Setup = request.param
    beside.of(setup.group or setup.name)
    with started(setup, tmp_path_factory.mktemp(setup.name)) as running:
        yield running


@pytest.fixture
def clean(prefill: Prefill) -> Iterator[None]:
    """The server is unharmed by the test."""
    yield
    prefill.must_be_clean()


@pytest.fixture(scope="session")
def references() -> dict[Path, Reference]:
    """References made so far, by checkpoint."""
    return {}


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that all processes of the run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture
def reference(prefill: Prefill, references: dict[Path, Reference], run_folder: Path) -> Reference:
    """The server's model under transformers."""
    folder = checkpoint(prefill.setup.shape)
    if folder not in references:
        references[folder] = Reference(folder, run_folder / "references")
    return references[folder]


@pytest.fixture(autouse=True)
def _numbers_next_to_zero() -> Iterator[None]:
    """The host platform flushes them once SGLang's model runner is imported; other tests of the process have them."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)
