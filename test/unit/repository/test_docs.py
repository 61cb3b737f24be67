"""The manuals name every knob, every flag, and every key of the router's status."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest
from laps_core.config import LapsConfig
from laps_core.pools.controller import Move
from laps_core.pools.layout import FEWEST
from laps_core.refusals import ONE_SAMPLE
from laps_emulate import plugin
from sglang_laps import options

REPO = Path(__file__).parents[3]
DOCS = REPO / "docs"
MANUAL = (DOCS / "LAPS.md").read_text()
ROUTER = (DOCS / "ROUTER.md").read_text()


def test_manual_names_every_knob_without_flag() -> None:
    missing = [f.name for f in fields(LapsConfig) if f"`{f.name}`" not in MANUAL and f.name not in LapsConfig.FLAGS]
    assert not missing


def test_manual_names_every_flag() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    options.add_flags(parser)
    plugin.add_flag(parser)
    flags = [s for action in parser._actions for s in action.option_strings]
    assert not [flag for flag in flags if f"`{flag}`" not in MANUAL]


def test_manual_defaults_match_config() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\S+) \|", MANUAL, re.MULTILINE))
    words: dict[str, object] = {"none": None, "derived": None, "off": False, "false": False, "true": True}
    told = {name: f.default for f in fields(LapsConfig) if (name := LapsConfig.FLAGS.get(f.name, f.name)) in rows}
    assert len(told) > 10
    for name, default in told.items():
        said = words.get(rows[name], rows[name])
        assert said == default or float(str(said)) == default, name


def test_help_defaults_match_config() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    options.add_flags(parser)
    helps = {s: action.help or "" for action in parser._actions for s in action.option_strings}
    knobs = {f.name: helps[flag] for f in fields(LapsConfig) if (flag := LapsConfig.FLAGS.get(f.name)) in helps}
    given = {name: found[1] for name, text in knobs.items() if (found := re.search(r"default: ([\d.]+)[);]", text))}
    assert {"length_threshold", "wait_window_ms", "wait_max_batch"} <= set(given)
    assert not [name for name, value in given.items() if float(value) != getattr(LapsConfig(), name)]


def test_router_manual_names_every_knob_and_flag() -> None:
    pytest.importorskip("sglang_router")
    from laps_core.pools.config import AllocConfig
    from sglang_router_laps import cli

    parser = argparse.ArgumentParser(add_help=False)
    cli.add_laps_args(parser)
    flags = [s for action in parser._actions for s in action.option_strings]
    # The manual can show a flag with its value.
    assert not [flag for flag in flags if not re.search(rf"`{flag}[` ]", ROUTER)]
    knobs = ROUTER[ROUTER.index("Keys of `--laps-alloc-config`") : ROUTER.index("Of the stock flags")]
    assert not [f.name for f in fields(AllocConfig) if f"`{f.name}`" not in knobs]


def test_router_manual_names_honoured_stock_flags() -> None:
    pytest.importorskip("sglang_router")
    from sglang_router_laps import stock_flags

    told = {name for name in stock_flags.HONOURED if f"`{stock_flags.flag(name)}" in ROUTER}
    # Some flags are described together, some are derived from others; host and port need no description.
    shown = {name for name in stock_flags.HONOURED if name.startswith(("health_", "retry_")) or name.endswith("_urls")}
    assert stock_flags.HONOURED - told - shown <= {"host", "port", "bootstrap_port_annotation", "disable_health_check"}


def keys(value: object) -> set[str]:
    """Return all keys in a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_router_manual_names_every_status_key() -> None:
    pytest.importorskip("sglang_router")
    from laps_core.pools.config import AllocConfig
    from sglang_router.router_args import RouterArgs
    from sglang_router_laps.http.status import status
    from sglang_router_laps.router import Router
    from sglang_router_laps.tasks import Watched

    args = RouterArgs(prefill_urls=[("http://p:1", 1), ("http://p:2", 1)], decode_urls=["http://d:1"])
    router = Router(args, AllocConfig())
    move = Move("p", "short", "long", 0.0, "x")
    router.journal.note_beat(router.pools.instances, {"short": 0.0, "long": 0.0}, [move], [])
    router.tasks.watched.append(Watched("x"))
    found = status(router, history=1)
    # The status of a token counter has its own description, and class names appear everywhere.
    del found["tokens"]
    named = keys(found) - {"short", "long"} | {"tokens"}
    assert not sorted(key for key in named if f"`{key}`" not in ROUTER)


@pytest.mark.parametrize("path", [*sorted(DOCS.glob("*.md")), REPO / "README.md"], ids=lambda path: path.name)
def test_tables_are_not_split_by_empty_lines(path: Path) -> None:
    """A table row after an empty line starts a table, so a line with column rules must follow."""
    lines = ["", *path.read_text().splitlines(), ""]
    first = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].strip()]
    assert not [lines[i] for i in first if not lines[i + 1].startswith(("| --", "|:-", "|--"))]


def test_manual_quotes_refusal_message_for_n() -> None:
    (quoted,) = re.findall(r"^\| 400 `(n: [^`]*)`", MANUAL, re.MULTILINE)
    assert ONE_SAMPLE.startswith(quoted)


def test_first_pool_example_has_enough_servers_for_two_pools() -> None:
    command = (REPO / "README.md").read_text().split("--pd-disaggregation --mini-lb")[1].split("--enable-laps-alloc")[0]
    assert command.count("--prefill http") >= FEWEST
