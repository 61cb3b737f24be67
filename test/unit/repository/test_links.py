"""Links between the documents of the repository lead to existing targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
BUILT = {"out", "build", "dist", "node_modules"}
"""Folders of generated files, which are not checked."""
PAGES = sorted(
    path
    for path in REPO.rglob("*.md")
    if not any(part in BUILT or part.startswith(".") for part in path.relative_to(REPO).parts)
)
CODE = re.compile(r"^```.*?^```|^    [^\n]*$|`[^`\n]*`", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.M)
ANCHOR = re.compile(r"<a id=\"([^\"]+)\"")


def links(page: Path) -> list[str]:
    """Return the targets of a page's links: files of the repository and their headings."""
    found = LINK.findall(CODE.sub("", page.read_text()))
    return [link for link in found if not re.match(r"[a-z][a-z0-9+.-]*:", link)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: explicit names, and headings as GitHub names them."""
    text = page.read_text()
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text))
    return {*ANCHOR.findall(text), *plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_point_to_existing_targets(page: Path) -> None:
    dead = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or not target.is_relative_to(REPO) or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def test_pages_and_readme_links_are_found() -> None:
    assert {"README.md", "docs/LAPS.md", "examples/README.md"} <= {str(page.relative_to(REPO)) for page in PAGES}
    assert links(REPO / "README.md")


def test_architecture_names_only_existing_files() -> None:
    text = (REPO / "docs" / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    files = [
        f.relative_to(REPO).as_posix()
        for top in ("python", "sgl-model-gateway", "benchmark", "test")
        for f in (REPO / top).rglob("*.py")
    ]
    assert named
    assert not [name for name in named if not any(f"/{f}".endswith(f"/{name}") for f in files)]
