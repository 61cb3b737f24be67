"""Table of SGLang's names that we use: it matches the release, and our code touches no other names."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm
from laps_emulate.seams import SEAMS as EMULATE
from sglang_laps import compat, seams

ROOT = Path(seams.__file__).parents[1]
REPO = Path(__file__).parents[2]
TABLES = {"sglang_laps": seams.SEAMS, "laps_emulate": EMULATE}
"""Tables of SGLang's names, by package."""
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for package in TABLES
    for path in sorted((ROOT / package).rglob("*.py"))
}
SEAMS = [seam for table in TABLES.values() for seam in table]


def seams_of_use(use: str) -> set[str]:
    return {seam.name for seam in SEAMS if seam.use == use}


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.name}-{seam.use}")
def test_installed_release_matches_seam_table(seam: seams.Seam) -> None:
    assert seams.changed(seam) is None


def test_each_seam_is_used_in_named_module() -> None:
    for package, seam in ((package, seam) for package, table in TABLES.items() for seam in table):
        last = seam.name.rpartition(".")[2].strip("[]")
        for module in seam.where.split(", "):
            begins = f"{package}/{module}.py", f"{package}/{module}/"
            texts = [text for path, text in SOURCES.items() if path.startswith(begins)]
            assert seam.use == "followed" or any(last in text for text in texts), (seam.name, module)


def test_hooks_are_registered_only_from_table() -> None:
    assert [path for path, text in SOURCES.items() if "HookRegistry.register" in text] == ["sglang_laps/seams.py"]
    with pytest.raises(KeyError, match="is not hooked by the table"):
        seams.hook("managers.scheduler.Scheduler.on_idle", print, "AFTER")


def overrides(ours: type, stock: type) -> set[str]:
    """Return the methods of SGLang that our class overrides."""
    return {name for name, own in vars(ours).items() if callable(own) and hasattr(stock, name)} - {"__init__"}


def test_overridden_methods_are_in_table(mixin: Any) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang_laps import adder
    from sglang_laps.telemetry.receipts import LapsOutputStreamer

    added = (adder.LapsPrefillAdder, adder.WholePrefillAdder, adder.ShortPrefillAdder)
    found = {f"managers.scheduler.Scheduler.{name}" for name in overrides(mixin, Scheduler) if name[:2] != "__"}
    found |= {f"managers.scheduler.Scheduler.{name}" for name in overrides(compat.EarlySendGuard, Scheduler)}
    for ours in added:
        found |= {f"managers.schedule_policy.PrefillAdder.{name}" for name in overrides(ours, PrefillAdder)}
    streamer = f"{SchedulerOutputStreamer.__module__}.SchedulerOutputStreamer".removeprefix(seams.ROOT)
    found |= {f"{streamer}.{name}" for name in overrides(LapsOutputStreamer, SchedulerOutputStreamer)}
    found = {name for name in found if not name.rpartition(".")[2].startswith("__")}
    table = {
        name
        for name in seams_of_use("overridden")
        if name.startswith("managers.") and name.rpartition(".")[2].islower()
    }
    assert found == table - compat.release().missing


def subclassed() -> Iterator[str]:
    """Yield the names of SGLang's classes that our classes inherit from."""
    for text in SOURCES.values():
        tree = ast.parse(text)
        theirs = {
            alias.asname or alias.name: f"{node.module}.{alias.name}".removeprefix(seams.ROOT)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(seams.ROOT)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield from (theirs[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in theirs)


def test_subclassed_classes_are_in_table() -> None:
    table = {name for name in seams_of_use("overridden") if name.rpartition(".")[2][0].isupper()}
    # The scheduler is the mixin's base only for type checkers; the mixin replaces the scheduler class.
    assert set(subclassed()) - {"managers.scheduler.Scheduler"} == table


def test_permanently_set_attributes_are_in_table() -> None:
    """Attributes that are set only while a batch is built (the slot, the queue) are restored in the same function."""
    setting = re.compile(
        r"\b(?:\w*runner(?:\.(?:attn_backend|eager_runner))?|attention|scheduler|manager|mooncake\.\w+"
        r"|module(?:\.DraftBackendFactory)?|dp_attention|forward_batch_info|logits_processor"
        r"|layer|fused_moe_native|operations_strategy|drainer|policy)\.(\w+) = "
    )
    found = {name for text in SOURCES.values() for name in setting.findall(text) if not name.startswith("laps_")}
    assert found == {name.rpartition(".")[2].strip("[]") for name in seams_of_use("set")}


@pytest.mark.parametrize("name", ["add_cli_args", "from_cli_args", "resolve_once"])
def test_method_hooked_by_other_plugin_is_not_reported_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
    from sglang.srt.server_args import ServerArgs

    stock = vars(ServerArgs)[name]
    kind = type(stock) if isinstance(stock, (classmethod, staticmethod)) else lambda function: function
    monkeypatch.setattr(ServerArgs, name, kind(_wrap_fn(getattr(stock, "__func__", stock), print, HookType.AROUND)))
    (seam,) = (seam for seam in seams.SEAMS if seam.name == f"server_args.ServerArgs.{name}")
    assert seams.changed(seam) is None


CHANGED = """
import sys
import sglang.srt.managers.scheduler as module
exec(sys.argv[1])
from sglang.srt.plugins import load_plugins
load_plugins()
print("served all the same")
"""
ON = {"SGLANG_LAPS_SCHEDULER": "1"}
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("del module.Scheduler.process_pending_chunked_abort", f"{SCHEDULER}.process_pending_chunked_abort is gone"),
        (
            "module.Scheduler.run_batch = lambda self, batches: None",
            f"{SCHEDULER}.run_batch takes (self, batches), not (self, batch, pp_proxy_tensors=)",
        ),
        (
            "module.Scheduler.ingest_requests = lambda self, stop_at_pause=False: []",
            f"{SCHEDULER}.ingest_requests has another body",
        ),
        (
            "from sglang_laps import transfers; del transfers.hook_races",
            "AttributeError: module 'sglang_laps.transfers'",
        ),
    ],
)
def test_changed_name_is_refused_in_one_line(change: str, says: str) -> None:
    done = warm.SGLANG.run("-c", CHANGED, change, env=ON)
    assert done.returncode == 2, done.stdout[-1000:] + done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("sglang-laps: error: ")]
    assert says in line
    assert "served all the same" not in done.stdout


def test_seams_are_not_checked_without_laps() -> None:
    change = "module.Scheduler.run_batch = lambda self, batches: None"
    done = warm.SGLANG.run("-c", CHANGED, change, env={"SGLANG_LAPS_SCHEDULER": ""})
    assert "served all the same" in done.stdout, done.stderr[-2000:]


THIRD = """
import sys
sys.path.insert(0, sys.argv[1])
import sglang.srt.managers.scheduler as module
module.Scheduler.start_batch = module.Scheduler.run_batch
del module.Scheduler.run_batch
from sglang.srt.plugins import load_plugins
load_plugins()
print("served all the same")
"""


def test_unknown_release_is_refused_with_changed_name(tmp_path: Path) -> None:
    info = tmp_path / "sglang-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")
    done = warm.SGLANG.run("-c", THIRD, str(tmp_path), env=ON)
    assert done.returncode == 2, done.stdout[-1000:] + done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("sglang-laps: error: ")]
    # In an older release, names before this one differ from the newest release, too.
    differs = f"{SCHEDULER}.run_batch is gone" if compat.installed() == [*compat.RELEASES][-1] else seams.ROOT
    assert f"supports sglang {' and '.join(compat.RELEASES)}; found 9.9, where {differs}" in line
    assert "served all the same" not in done.stdout


def test_each_release_has_constraints_and_lists_only_differences() -> None:
    pins = {r: (REPO / f"constraints-{r}.txt").read_text().split() for r in list(compat.RELEASES)[:-1]}
    newest = (REPO / "constraints.txt").read_text().split()
    assert f"sglang=={list(compat.RELEASES)[-1]}" in newest
    expected = {seam.name: seam.expected for seam in SEAMS}
    for name, pinned in pins.items():
        assert f"sglang=={name}" in pinned
        assert not set(pinned) & set(newest)
        assert all(expected[seam] != differs for seam, differs in compat.RELEASES[name].expected.items())
    lowest, _ = compat.RELEASES
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert f"sglang>={lowest},<0.5.24" in project["optional-dependencies"]["server"]


class Stock:
    """Scheduler with the fields that the guard needs."""

    laps: Any = None

    def __init__(self) -> None:
        self.sent: list[str] = []

    def run_batch(self, batch: Any) -> None:
        for req in batch.reqs:
            self.maybe_send_cached_prefix_chunk(req)

    def maybe_send_cached_prefix_chunk(self, req: Any) -> None:
        if not req.pending_bootstrap:
            self.sent.append(req.rid)


@pytest.mark.parametrize(("laps", "loads", "sent"), [(True, 3, []), (True, -1, ["a"]), (None, 3, ["a"])])
def test_early_send_guard_holds_prefix_that_is_still_loading(laps: Any, loads: int, sent: list[str]) -> None:
    scheduler = type("Guarded", (compat.EarlySendGuard, Stock), {"laps": laps})()
    req = SimpleNamespace(rid="a", pending_bootstrap=False)
    scheduler.run_batch(SimpleNamespace(reqs=[req], hicache_consumer_index=loads))
    assert (scheduler.sent, req.pending_bootstrap) == (sent, False)


FAILS = """
import sglang.srt.managers.scheduler as module
from sglang.srt.plugins import hook_registry, load_plugins
sound = hook_registry.HookRegistry._apply_target.__func__
def apply(cls, target, hooks):
    if target.endswith("CommonKVManager.check_status"):
        raise RuntimeError("another plugin was here")
    return sound(cls, target, hooks)
hook_registry.HookRegistry._apply_target = classmethod(apply)
load_plugins()
module.Scheduler(None, None)
"""


def test_failed_hook_is_refused_in_one_line() -> None:
    done = warm.SGLANG.run("-c", FAILS, env=ON)
    assert done.returncode == 2, done.stdout[-1000:] + done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("sglang-laps: error: ")]
    assert "has not applied the hook of sglang.srt.disaggregation.common.conn.CommonKVManager.check_status" in line
