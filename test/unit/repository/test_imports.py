"""Imports have no cycles: neither between modules (including local imports), nor folders, nor packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
ROOTS = (REPO / "python", REPO / "sgl-model-gateway/bindings/python/src")
PACKAGES = {
    **dict.fromkeys(("laps_core", "laps_emulate", "laps_plan", "laps_top", "sglang_laps"), ROOTS[0]),
    "sglang_router_laps": ROOTS[1],
}


@cache
def modules(package: str) -> dict[str, Path]:
    root = PACKAGES[package]
    files = (root / package).rglob("*.py")
    return {".".join(f.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imports(module: str, file: Path, known: Set[str]) -> set[str]:
    """Return modules in ``known`` that ``module`` imports at its top, in a function, or for type checkers only."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    named: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            # The imported name is a module of the package or a name inside it.
            named.update(x if (x := f"{origin}.{alias.name}") in known else origin for alias in node.names)
    return (named & known) - {module}


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return list(e.args[1])
    return []


def graph_of(package: str) -> dict[str, set[str]]:
    found = modules(package)
    return {name: imports(name, file, found.keys()) for name, file in found.items()}


def folders(graph: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """Return the imports between the folders of a package; a module outside of folders counts as a folder."""

    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    rooms: dict[str, set[str]] = {}
    for module, named in graph.items():
        rooms.setdefault(room(module), set()).update(room(n) for n in named if room(n) != room(module))
    return rooms


@pytest.mark.parametrize("package", list(PACKAGES))
def test_modules_have_no_import_cycles(package: str) -> None:
    assert not circle(graph_of(package))


@pytest.mark.parametrize("package", list(PACKAGES))
def test_folders_have_no_import_cycles(package: str) -> None:
    assert not circle(folders(graph_of(package)))


def test_import_cycles_are_detected() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def may_import() -> dict[str, set[str]]:
    """Return, from the table of docs/ARCHITECTURE.md, the packages that each package may import."""
    text = (REPO / "docs/ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    return {package: set(re.findall(r"`(\w+)`", named)) for package, named in rows if package in PACKAGES}


def test_packages_import_only_packages_allowed_by_table() -> None:
    may = may_import()
    assert may.keys() == PACKAGES.keys()
    order = list(may)
    for i, package in enumerate(order):
        assert may[package] <= set(order[:i]), f"{package} may import what stands below it"
        found: dict[str, set[str]] = {}
        for name, file in modules(package).items():
            for other in set(order) - {package}:
                if imports(name, file, modules(other).keys()):
                    found.setdefault(other, set()).add(name)
        assert found.keys() <= may[package], found


IMPURE = {"asyncio", "benchmark", "os", "random", "socket", "subprocess", "sglang", "threading", "time", "torch"}
"""Modules that a policy must not import: clocks, randomness, input and output, and device code."""


def top_level(file: Path) -> set[str]:
    """Return the first part of each module name that ``file`` imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).partition(".")[0])
    return names


def test_core_imports_no_clock_randomness_or_io() -> None:
    assert not {name: found for name, file in modules("laps_core").items() if (found := top_level(file) & IMPURE)}


@pytest.mark.parametrize("package", list(PACKAGES))
def test_no_package_imports_benchmarks_or_tests(package: str) -> None:
    outside = {"benchmark", "test", *(p.stem for p in (REPO / "test/support").iterdir())}
    assert not {name: found for name, file in modules(package).items() if (found := top_level(file) & outside)}
