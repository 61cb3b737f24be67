"""laps-patch --server on copies of the installed SGLang: apply, revert byte for byte, refuse other files. Each
patch's own test fails without the patch and passes with it."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import upstream
from sglang_laps import seams
from sglang_router_laps.patching import command
from sglang_router_laps.patching.command import SERVER, main
from sglang_router_laps.patching.series import Series, change

SERIES = Series(SERVER)
NAMES = [name for name, _ in SERIES.patches]
TESTS = {name: SERVER / f"test_{name[5:].removesuffix('.patch').replace('-', '_')}.py" for name in NAMES}
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) \S*?(test_\w+\.py)", re.MULTILINE)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a copy of the package as released."""
    return upstream.copy_package(tmp_path / "site", SERIES.states)


def texts(root: Path) -> dict[str, bytes]:
    return {path: (root / path).read_bytes() for path in SERIES.states}


def outcomes(root: Path) -> dict[str, set[str]]:
    """Run the tests of all patches against this copy in one process and return the outcomes by file."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-c", os.devnull,
         "--rootdir", str(SERVER), *map(str, TESTS.values())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]),
             "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    for outcome, file in OUTCOME.findall(done.stdout):
        found.setdefault(file, set()).add(outcome)
    assert found, done.stdout + done.stderr
    return found


def test_apply_and_revert_restore_every_byte(root: Path) -> None:
    before = texts(root)
    for action, again in (("apply", "apply"), ("revert", "revert")):
        assert main([action, "--server", "--root", str(root)]) == 0
        changed = texts(root)
        assert {path for path in before if before[path] != changed[path]} == (
            set(before) if action == "apply" else set()
        )
        assert main([again, "--server", "--root", str(root)]) == 0
        assert texts(root) == changed


def test_each_patch_has_description_and_test() -> None:
    assert sorted(NAMES) == sorted(file.name for file in SERVER.glob("*.patch"))
    assert sorted(TESTS.values()) == sorted(SERVER.glob("test_*.py"))
    for name in NAMES:
        text = (SERVER / name).read_text()
        assert text.startswith("Subject: [PATCH ")
        assert TESTS[name].name in text
        assert "laps" not in text.lower().replace("collaps", "").replace("elaps", "").replace("overlaps", "")


def test_each_patch_applies_and_reverts_in_its_order(root: Path) -> None:
    texts = {path: (root / path).read_bytes() for path in SERIES.states}
    for name, changes in SERIES.patches:
        assert changes, name
        for path in changes:
            before, texts[path] = texts[path], change(texts[path], changes, path)
            assert texts[path] != before
            compile(texts[path], path, "exec")
            assert change(texts[path], changes, path, reverse=True) == before


@pytest.mark.timeout(1900)
def test_patch_tests_fail_without_and_pass_with_patches(root: Path) -> None:
    stock = outcomes(root)
    assert main(["apply", "--server", "--root", str(root)]) == 0
    patched = outcomes(root)
    for file in (test.name for test in TESTS.values()):
        assert "FAILED" in stock[file], file
        assert patched[file] == {"PASSED"}, file


def test_seam_table_has_digests_of_patched_functions(root: Path) -> None:
    followed = {seam.name: (seam.expected or "").split() for seam in seams.SEAMS if seam.use == "followed"}
    assert main(["apply", "--server", "--root", str(root)]) == 0
    known = []
    for path in SERIES.states:
        lines = (root / path).read_text().splitlines(keepends=True)
        for node in ast.walk(ast.parse("".join(lines))):
            says = [d for name, d in followed.items() if isinstance(node, ast.FunctionDef) and name.endswith(node.name)]
            if says and isinstance(node, ast.FunctionDef) and len(says[0]) > 1:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
                digest = hashlib.sha256("".join(lines[first : node.end_lineno]).encode()).hexdigest()[:12]
                known.append(digest == says[0][1])
    assert known == [True, True]


def test_unsupported_release_is_refused_in_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = texts(root)
    (root / "sglang/_version.py").write_text("__version__ = version = '0.5.22'\n")
    assert main(["apply", "--server", "--root", str(root)]) == 1
    err = capsys.readouterr().err
    assert err == "laps-patch: sglang is 0.5.22, the patches are for 0.5.23; nothing was changed\n"
    assert texts(root) == before
    assert main(["status", "--server", "--root", str(root)]) == 0
    assert "not 0.5.23" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_modified_file_is_refused_in_one_line(root: Path, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = sorted(SERIES.states)[-1]
    (root / path).write_bytes((root / path).read_bytes() + b"# mine\n")
    before = texts(root)
    assert main([action, "--server", "--root", str(root)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "modified" in err
    assert texts(root) == before


def test_failed_write_restores_all_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = texts(root)
    replaced = os.replace
    left = [replaced, replaced]

    def full(new: Path, file: Path) -> None:
        if file.read_bytes() == before[str(file.relative_to(root))]:
            if not left:
                raise OSError(28, "No space left on device", str(file))
            left.pop()
        replaced(new, file)

    monkeypatch.setattr("sglang_router_laps.patching.files.os.replace", full)
    assert main(["apply", "--server", "--root", str(root)]) == 1
    assert texts(root) == before


def test_installed_package_is_found_without_import() -> None:
    code = "import sys; from sglang_router_laps.patching import command as c; c.main(['status', '--server']); "
    code += "assert 'sglang.srt' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sglang 0.5.23 ") == len(SERIES.states)
    assert command.find_root("sglang", None) == upstream.SITE
