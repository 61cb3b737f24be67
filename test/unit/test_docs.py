"""The manual names every knob and every flag."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from laps_core.config import FLAGS, LapsConfig
from sglang_laps import options

MANUAL = (Path(__file__).parents[2] / "docs" / "LAPS.md").read_text()


def test_every_knob_is_in_the_manual() -> None:
    missing = [f.name for f in fields(LapsConfig) if f"`{f.name}`" not in MANUAL and f.name not in FLAGS]
    assert not missing


def test_every_flag_is_in_the_manual() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    options.add_flags(parser)
    flags = [s for action in parser._actions for s in action.option_strings]
    assert not [flag for flag in flags if f"`{flag}`" not in MANUAL]
