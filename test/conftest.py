"""One prefill server at a time for all tests that name the same one, and the order of tests that makes it so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lean
import pytest
from served import SEVERAL, Beside, Prefill, Reference, Setup, checkpoint, started

from benchmark.rig import servers

PORTS = 17_500
"""Above those that Mooncake takes by itself, below those of ``servers.PORTS``."""


def pytest_configure(config: pytest.Config) -> None:
    """Servers start lean; workers choose ports apart from each other, and from the commands that tests start."""
    os.environ.update(lean.environment())
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    low = PORTS + 800 * (worker % 4)
    servers.PORTS = (low, low + 800)
    config.addinivalue_line("markers", "xdist_group(name): tests that run in one worker")


def setup_of(item: pytest.Item) -> Setup | None:
    """The server that a test runs on."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    found = params.get("prefill")
    return found if isinstance(found, Setup) else None


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one process: those of one server, or of one that is marked so."""
    setup, mark = setup_of(item), item.get_closest_marker("xdist_group")
    return (setup.group or setup.name) if setup else mark.args[0] if mark else ""


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Tell pytest-xdist, before it looks."""
    if group := group_of(item):
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts several servers first, for it takes longest; then what needs none; then server after server."""
    groups = [group_of(item) for item in items]
    order = [((s := setup_of(item)) and s.name) or "" for item in items]
    seen: dict[str, int] = {}
    for name in order:
        seen.setdefault(name, len(seen))

    def key(i: int) -> tuple[bool, bool, int, str, int, int]:
        group = groups[i]
        return group != SEVERAL, bool(group), -groups.count(group), group, seen[order[i]], i

    items[:] = [items[i] for i in sorted(range(len(items)), key=key)]


@pytest.fixture(scope="session")
def beside() -> Iterator[Beside]:
    """What runs beside the prefill server."""
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
    """Those made so far, by checkpoint."""
    return {}


@pytest.fixture
def reference(prefill: Prefill, references: dict[Path, Reference]) -> Reference:
    """The server's model under transformers."""
    folder = checkpoint(prefill.setup.shape)
    if folder not in references:
        references[folder] = Reference(folder)
    return references[folder]
