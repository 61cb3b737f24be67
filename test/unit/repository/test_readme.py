"""Commands and measurements in the README."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

REPO = Path(__file__).parents[3]
README = (REPO / "README.md").read_text()
RESULTS = (REPO / "docs" / "RESULTS.md").read_text()
REPORT = (REPO / "benchmark" / "report" / "README.md").read_text()


def test_readme_names_missed_router_bars() -> None:
    line = r"^\| \[.*?\|\s*router: ([^|]*?)\s*\|\s*([^\s|]+)(?: \[[^\]|]*\])?\s*\|.*\*\*MISSED\*\*\s*\|$"
    rows = re.findall(line, REPORT, re.M)
    part = README.split("### Bars that are missed")[1].split("\n## ")[0].split("The **prefill server**")[0]
    named = re.findall(r"^- .*?(\d+(?:\.\d+)?) times stock's", part, re.M)
    assert named == [value for _, value in rows]


def test_results_list_exactly_pieces_with_missed_bars() -> None:
    missed = set(re.findall(r"^\| \[.*?\]\(#(\S+)\)\s*\|.*\*\*MISSED\*\*\s*\|$", REPORT, re.M))
    part = RESULTS.split("## Bars that are missed")[1].split("\n## ")[0]
    assert set(re.findall(r"^- \[.*?\]\(\S+#(\S+)\): ", part, re.M)) == missed


def test_results_name_every_piece_of_report() -> None:
    pieces = set(re.findall(r'^<a id="(\S+)"></a>$', REPORT, re.M))
    part = RESULTS.split("## What was measured")[1].split("\n## ")[0]
    assert set(re.findall(r"report/README\.md#([\w.-]+)\)", part)) == pieces


def test_ci_runs_test_command_of_readme() -> None:
    command = "./run test"
    assert f"    {command} " in README
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "test.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    assert steps[-1]["run"] == command
