"""No docstring, and no name of a test, begins with a word that hides what it describes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
FOLDERS = ("benchmark", "python", "sgl-model-gateway/bindings/python/src/sglang_router_laps", "test")
"""Folders and files that are checked, relative to the repository."""
BANNED = ("Of", "As", "What", "Whatever", "Whether", "Who", "Whom", "Whose", "Whoever", "Where", "Its", "Their", "It",
          "They", "Them", "Those", "His", "Him")  # fmt: skip
_BEGINS = re.compile(rf"(?:{'|'.join(BANNED)})\b")


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def banned(text: str) -> list[int]:
    """Return the lines of docstrings in ``text`` that begin with a banned word."""
    return [d.lineno for d in docstrings(ast.parse(text)) if _BEGINS.match(str(d.value).strip())]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_with_banned_word(folder: str) -> None:
    top = REPO / folder
    files = [top] if top.is_file() else sorted(top.rglob("*.py"))
    assert files
    assert not [f"{f.relative_to(REPO)}:{line}" for f in files for line in banned(f.read_text())]


def test_banned_finds_docstrings_of_all_kinds() -> None:
    text = '"""Of it."""\nN = 1\n"""Its number."""\n\n\ndef f() -> None:\n    """Office hours."""\n    """What."""\n'
    assert banned(text) == [1, 3, 8]


def test_test_names_begin_with_subject() -> None:
    words = "|".join(("a", "an", "the", *(w.lower() for w in BANNED)))
    begins = re.compile(rf"def (test_(?:{words})_\w+)")
    files = sorted((REPO / "test").rglob("test_*.py"))
    assert files
    assert not [f"{f.relative_to(REPO)}: {name}" for f in files for name in begins.findall(f.read_text())]
