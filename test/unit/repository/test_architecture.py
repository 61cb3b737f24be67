"""The picture of the architecture names all packages, and only existing files and folders; no file is too long."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"
ROOTS = (REPO / "python", REPO / "sgl-model-gateway/bindings/python/src", REPO)
PACKAGES = {"laps_core", "laps_plan", "laps_top", "sglang_laps", "laps_emulate", "sglang_router_laps", "benchmark"}
LONGEST = 300
"""Most lines of a file."""


def drawn() -> dict[str, list[str]]:
    """Return each package in the picture, with the files and folders named in its box."""
    picture = ET.parse(REPO / "docs" / "architecture.svg").getroot()
    return {
        box.attrib["id"]: [str(text.text) for text in box.iter(f"{SVG}text") if text.get("class") == "room"]
        for box in picture.iter(f"{SVG}g")
    }


def test_architecture_picture_shows_every_package() -> None:
    assert drawn().keys() == PACKAGES


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_picture_names_only_existing_files_and_folders(package: str) -> None:
    (folder,) = (root / package for root in ROOTS if (root / package).is_dir())
    rooms = drawn()[package]
    assert rooms
    assert not [room for room in rooms if not (folder / room).exists()]


def test_picture_is_embedded_and_supports_dark_mode() -> None:
    assert "](architecture.svg)" in (REPO / "docs" / "ARCHITECTURE.md").read_text()
    assert "prefers-color-scheme: dark" in (REPO / "docs" / "architecture.svg").read_text()


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_files_do_not_exceed_line_limit(package: str) -> None:
    (folder,) = (root / package for root in ROOTS if (root / package).is_dir())
    lines = {str(file.relative_to(folder)): len(file.read_text().splitlines()) for file in folder.rglob("*.py")}
    assert lines
    assert not {file: n for file, n in lines.items() if n > LONGEST}
