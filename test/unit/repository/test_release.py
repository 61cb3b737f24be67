"""The wheel, in an environment with the dependencies but without the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).parents[3]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
SOURCES = (REPO / "python", REPO / "sgl-model-gateway/bindings/python/src")
PACKAGES = [p for root in SOURCES for p in sorted(root.iterdir()) if (p / "__init__.py").exists()]
NO_DATA = (".py", ".pyc")
DOCKERFILE = (REPO / "examples" / "docker" / "Dockerfile").read_text()


class Installed(NamedTuple):
    """A fresh environment with the wheel."""

    wheel: Path
    source: Path
    folder: Path

    def run(self, *command: str | Path, **env: str) -> str:
        """Run a command of this environment and return its output. Fails the test if the command fails."""
        return run(self.folder, *command, **env)


def make_environment(folder: Path) -> Path:
    """Make an environment that sees the packages of this one, except editable installs."""
    venv.create(folder)
    scheme = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    here = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    Path(scheme, "below.pth").write_text("\n".join(here))
    return folder


def run(folder: Path, *command: str | Path, **env: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP", "SGLANG", "LAPS"))}
    path = os.pathsep.join((str(folder / "bin"), inherited["PATH"]))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**inherited, "PATH": path, **OFFLINE, **env},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


OFFLINE = {
    # pip must ignore the editable install of the project: neither count it as installed nor remove it.
    **dict.fromkeys(("PIP_NO_INDEX", "PIP_NO_DEPS", "PIP_IGNORE_INSTALLED", "PIP_DISABLE_PIP_VERSION_CHECK"), "1"),
    "PYTHONDONTWRITEBYTECODE": "1",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, REPO / ".ci/release.py", out], check=True, capture_output=True)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    folder = make_environment(tmp_path_factory.mktemp("venv"))
    run(folder, folder / "bin/python", "-m", "pip", "install", "-q", wheel)
    return Installed(wheel, source, folder)


def test_wheel_contains_all_package_files(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    for package in PACKAGES:
        # Follow links: the patches are a link to a folder.
        found = {Path(base, f) for base, _, files in os.walk(package, followlinks=True) for f in files}
        ours = {p.relative_to(package.parent).as_posix() for p in found if "__pycache__" not in p.parts}
        ours.discard("sglang_router_laps/patching/patches/README.md")
        assert not ours - names
        assert f"{package.name}/py.typed" in names
    with tarfile.open(installed.source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "constraints.txt"} <= inside
    assert len([n for n in inside if n.endswith(".py")]) >= len([n for n in names if n.endswith(".py")])


def test_wheel_metadata_matches_project(installed: Installed) -> None:
    wheel = zipfile.ZipFile(installed.wheel)
    info = f"sglang_laps-{PROJECT['version']}.dist-info"
    meta = BytesParser().parsebytes(wheel.read(f"{info}/METADATA"))
    assert (meta["Name"], meta["Version"], meta["License-Expression"]) == (
        "sglang-laps",
        PROJECT["version"],
        "Apache-2.0",
    )
    assert meta["Requires-Python"] == PROJECT["requires-python"]
    assert meta.get_all("Provides-Extra") == [*PROJECT["optional-dependencies"]]
    assert [r for r in meta.get_all("Requires-Dist", ()) if "extra" not in r] == PROJECT["dependencies"]
    assert str(meta.get_payload()).startswith("# sglang-laps")
    licences = meta.get_all("License-File", ())
    assert {"LICENSE", *(f"python/laps_plan/{x}/README.md" for x in ("traces", "profiles"))} == set(licences)
    assert all(wheel.read(f"{info}/licenses/{name}") == (REPO / name).read_bytes() for name in licences)
    said = "".join(wheel.read(f"{info}/licenses/{name}").decode() for name in licences[1:])
    data = [
        p.name
        for x in ("traces", "profiles")
        for p in (REPO / "python/laps_plan" / x).iterdir()
        if p.name != "README.md"
    ]
    assert not [name for name in data if f"`{name}`" not in said and f"`{name.partition('-')[0]}-*.json`" not in said]
    assert f"## [{PROJECT['version']}]" in (REPO / "CHANGELOG.md").read_text()


ENTRIES = """
import json
from importlib.metadata import distribution, entry_points
import laps_core, sglang_router_laps
ours = [e for e in distribution("sglang-laps").entry_points]
found = [e for g in ("sglang.srt.plugins", "sglang.srt.platforms") for e in entry_points(group=g) if "laps" in e.name]
[e.load() for e in ours]
commands = [e.name for e in ours if e.group == "console_scripts"]
print(json.dumps([laps_core.__file__, sglang_router_laps.__file__, len(found), commands]))
"""


def test_entry_points_load_and_commands_start(installed: Installed) -> None:
    *files, plugins, commands = json.loads(installed.run("python", "-c", ENTRIES).splitlines()[-1])
    assert all(Path(file).is_relative_to(installed.folder) for file in files)
    assert plugins == 3
    assert set(commands) == set(PROJECT["scripts"])
    for name in commands:
        assert "usage:" in installed.run(installed.folder / "bin" / name, "--help")


def test_laps_plan_runs_from_wheel(installed: Installed) -> None:
    said = installed.run(
        *("laps-plan", "--mix", "95% lmsys:256, 5% log:1024-8192", "--load", "0.7", "--requests", "100")
    )
    assert "TTFT" in said


@pytest.mark.parametrize("target", ["server", "router"])
def test_dockerfile_commands_run(target: str, installed: Installed, tmp_path: Path) -> None:
    stage = re.search(rf" AS {target}\n(.*?)(?=\nFROM |\Z)", DOCKERFILE, re.S)
    assert stage
    lines = stage.group(1).replace("\\\n", " ")
    (copied,) = re.findall(r"^COPY dist/\*\.whl (\S+)$", lines, re.M)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / installed.wheel.name).write_bytes(installed.wheel.read_bytes())
    folder = make_environment(tmp_path / "root")
    for line in re.findall(r"^RUN (.*)$", lines, re.M):
        run(folder, "sh", "-ec", line.replace(copied, f"{wheels}/"))
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", lines, re.M)
    python, _, module = json.loads(entry)
    where = "import importlib.util as u, sglang_laps, sys; print(u.find_spec(sys.argv[1]).name, sglang_laps.__file__)"
    name, file = run(folder, python, "-c", where, module).split()
    assert name == module
    assert Path(file).is_relative_to(folder)


def test_dockerfile_and_examples_name_current_releases() -> None:
    from sglang_laps.compat import RELEASES

    (image,) = re.findall(r"^ARG SGLANG_IMAGE=.*:v(\S+)$", DOCKERFILE, re.M)
    assert image == list(RELEASES)[-1]
    assert set(re.findall(r"sglang-laps-\w+:(\S+)", DOCKERFILE)) == {PROJECT["version"]}
    for path in (REPO / "examples").rglob("*.yaml"):
        assert set(re.findall(r"image: sglang-laps-\w+:(\S+)|newTag: (\S+)", path.read_text())) <= {
            (PROJECT["version"], ""), ("", PROJECT["version"]),
        }  # fmt: skip
