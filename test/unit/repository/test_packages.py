"""Every imported package is declared, in the dependencies or the extras of the importing folder."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import laps_core
import pytest

REPO = Path(__file__).parents[3]
ROUTER = "sgl-model-gateway/bindings/python/src"
NAMES = {
    "yaml": "pyyaml",
    "opentelemetry": "opentelemetry_sdk",
    "xdist": "pytest_xdist",
    "aiconfigurator_core": "aiconfigurator",
    "PIL": "pillow",
}
"""Packages whose import name differs from their package name."""
OURS = {"laps_core", "laps_emulate", "laps_plan", "laps_top", "sglang_laps", "sglang_router_laps", "benchmark"}
OURS |= {path.stem for path in (REPO / "test/support").iterdir()}
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_package_version_matches_pyproject() -> None:
    assert laps_core.__version__ == PROJECT["version"]


def declared(*extras: str) -> set[str]:
    """Return the names of the dependencies and of these extras, in the form of import names."""
    wanted = [*PROJECT["dependencies"], *(name for extra in extras for name in EXTRAS[extra])]
    return {re.split(r"[=<>;\[ ]", name)[0].replace("-", "_").lower() for name in wanted}


def imported(folder: str) -> Iterator[tuple[str, Path]]:
    """Yield third-party packages that are imported, each with the importing file."""
    for path in sorted((REPO / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for name in {m.partition(".")[0] for m in modules}:
                if name not in sys.stdlib_module_names and name not in OURS:
                    yield name, path


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("python/laps_core", ()),
        ("python/laps_plan", ("plan", "profile")),
        ("python/sglang_laps", ("server",)),
        ("python/laps_top", ("top",)),
        ("python/laps_emulate", ("server", "cpu")),
        (ROUTER, ("router", "kubernetes", "trace")),
        ("benchmark", ("server", "router", "dev")),
        ("test", ("server", "router", "dev", "trace")),
    ],
)
def test_imported_packages_are_declared(folder: str, extras: tuple[str, ...]) -> None:
    known = declared(*extras)
    missing = {
        f"{name} ({path.relative_to(REPO)})"
        for name, path in imported(folder)
        if NAMES.get(name, name).lower() not in known
    }
    assert not missing


def test_constraints_pin_declared_packages() -> None:
    pinned = {
        line.partition("==")[0].replace("-", "_").lower() for line in (REPO / "constraints.txt").read_text().split()
    }
    assert not declared(*EXTRAS) - pinned
