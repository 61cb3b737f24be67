"""laps-patch on copies of the installed sglang-router: apply, run, restore byte for byte, refuse other files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import sglang_router
import warm
from sglang_router_laps.patching.command import PATCHES, ROUTER, main

from benchmark.rig import servers

PAIR = ("--prefill", "http://127.0.0.1:1", "--prefill", "http://127.0.0.1:2", "--decode", "http://127.0.0.1:3")
FILE = "sglang_router/launch_router.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a copy of the package as released, without patches that the installed package may have."""
    shutil.copytree(Path(sglang_router.__file__).parent, tmp_path / "sglang_router")
    assert main(["revert", "--root", str(tmp_path)]) == 0
    return tmp_path


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*.py")}


def launch(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return warm.SGLANG.run("-m", "sglang_router.launch_router", *args, env={"PYTHONPATH": path(root)})


def path(root: Path) -> str:
    """Return the PYTHONPATH for the package in this folder."""
    return os.pathsep.join([str(root), *filter(None, sys.path)])


def test_apply_and_revert_restore_every_byte(root: Path) -> None:
    before = tree(root)
    assert main(["apply", "--root", str(root)]) == 0
    patched = tree(root)
    assert {f for f in before if before[f] != patched[f]} == {FILE}
    assert main(["apply", "--root", str(root)]) == 0
    assert tree(root) == patched
    assert main(["revert", "--root", str(root)]) == 0
    assert tree(root) == before
    assert main(["revert", "--root", str(root)]) == 0
    assert tree(root) == before


def test_status_reports_stock_patched_and_modified(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["status", "--root", str(root)])
    main(["apply", "--root", str(root)])
    main(["status", "--root", str(root)])
    (root / FILE).write_text("changed = 1\n")
    main(["status", "--root", str(root)])
    lines = capsys.readouterr().out.splitlines()
    states = [line.rsplit(": ", 1)[1] for line in lines]
    assert states[-4:] == ["stock", "patched", "patched", "modified"]


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_modified_file_is_refused_in_one_line(root: Path, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    (root / FILE).write_bytes((root / FILE).read_bytes() + b"# mine\n")
    before = tree(root)
    assert main([action, "--root", str(root)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "modified" in err
    assert tree(root) == before


def test_unsupported_version_is_refused_in_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "sglang_router/version.py").write_text('__version__ = "0.3.3"\n')
    assert main(["apply", "--root", str(root)]) == 1
    err = capsys.readouterr().err
    assert err == "laps-patch: sglang-router is 0.3.3, the patches are for 0.3.2; nothing was changed\n"


def test_apply_finds_package_in_source_checkout(root: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    inside = checkout / "sgl-model-gateway/bindings/python/src"
    shutil.copytree(root / "sglang_router", inside / "sglang_router")
    assert main(["apply", "--root", str(checkout)]) == 0
    assert b"sglang_router_laps" in (inside / FILE).read_bytes()


def test_root_without_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "--root", str(tmp_path)]) == 1
    assert "holds no sglang_router" in capsys.readouterr().err


def test_unknown_action_exits_2() -> None:
    with pytest.raises(SystemExit) as e:
        main(["bless"])
    assert e.value.code == 2


def test_failed_write_leaves_no_change_or_temporary_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(root)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", FILE)

    monkeypatch.setattr("sglang_router_laps.patching.files.os.replace", full)
    assert main(["apply", "--root", str(root)]) == 1
    assert tree(root) == before
    assert sorted(p.name for p in (root / "sglang_router").glob(".*")) == []


def test_patch_hunks_only_insert_lines() -> None:
    files = [ROUTER / name for name in (ROUTER / "series").read_text().split()]
    assert sorted(files) == sorted(PATCHES.glob("sglang-router-*/*.patch"))
    for file in files:
        body = [line for line in file.read_text().splitlines() if not line.startswith(("---", "+++", "@@"))]
        assert all(line.startswith("+") for line in body)


def test_patched_launcher_lists_and_validates_laps_flags(root: Path) -> None:
    stock = launch(root, "--help")
    main(["apply", "--root", str(root)])
    ours = launch(root, "--help")
    assert stock.returncode == ours.returncode == 0
    assert "--enable-laps-alloc" not in stock.stdout
    for flag in (
        "--enable-laps-alloc",
        "--laps-alloc-threshold",
        "--laps-rebalance-interval-s",
        "--laps-rebalance-ratio",
        "--laps-tokenizer",
        "--laps-alloc-config",
    ):
        assert flag in ours.stdout
    bad = launch(root, "--mini-lb", "--enable-laps-alloc", "--laps-alloc-threshold", "0")
    assert bad.returncode == 2
    assert bad.stderr.strip().splitlines()[-1] == "error: --laps-alloc-threshold: 0 is not a whole number >= 1"


def test_patched_launcher_serves_laps_status_only_with_flag(root: Path, tmp_path: Path) -> None:
    main(["apply", "--root", str(root)])
    for flags, answer in ((["--enable-laps-alloc"], 200), ([], 404)):
        router = servers.minilb([], [], tmp_path / "router.log", *PAIR, *flags)
        router.env = {"PYTHONPATH": path(root)}
        with servers.running(router):
            try:
                with urllib.request.urlopen(f"{router.url}/laps_status", timeout=180) as reply:
                    assert reply.status == answer
            except urllib.error.HTTPError as e:
                assert e.code == answer  # noqa: PT017
