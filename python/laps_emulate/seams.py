"""Every SGLang name that this package hooks, overrides or sets (``seams.txt``). See ``sglang_laps.seams``."""

from __future__ import annotations

from pathlib import Path

from sglang_laps.seams import read_table

SEAMS = read_table(Path(__file__).with_name("seams.txt"))
