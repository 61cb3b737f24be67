"""A hook that cannot be applied stops the start, after all others were tried."""

import json
from collections.abc import Iterator

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    HookRegistry.reset()
    yield
    HookRegistry.reset()


def test_failed_targets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", json.dumps)  # restored afterwards
    source = HookSource("some_plugin", "some_dist")
    HookRegistry.register("json.absent", lambda result: None, source=source)
    HookRegistry.register("json.dumps", lambda result, *args: result + "!")
    with pytest.raises(RuntimeError, match=r"json\.absent.*some_plugin.*some_dist") as raised:
        HookRegistry.apply_hooks()
    assert isinstance(raised.value.__cause__, AttributeError)
    assert json.dumps(1) == "1!"


def test_nothing_is_raised_where_all_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", json.dumps)
    HookRegistry.register("json.dumps", lambda result, *args: result + "!")
    HookRegistry.apply_hooks()
    HookRegistry.apply_hooks()
    assert json.dumps(1) == "1!"
