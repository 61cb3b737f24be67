"""The report's page from sample pieces, and the README's headline from the page."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmark import report
from benchmark.results import page, steps
from benchmark.results.bars import Bar
from benchmark.results.piece import Figure, Piece, Table, command_text
from benchmark.results.ratio import ratio
from benchmark.rig import servers
from benchmark.rig.model import REPO

BEGIN, END = page.markers(page.HEADLINE)
EMULATED = "\n".join(page.markers(page.EMULATED))
README = f"before\n{EMULATED}\n{BEGIN}\nold\n{END}\nafter\n"


def piece(name: str, value: float = 0.4) -> Piece:
    return Piece(
        name=name,
        title=f"Title of {name}",
        text="What was asked.",
        seed=3,
        tables=[Table("T", ("variant", "short|P90"), [("laps", "46"), ("fcfs", "661")], "A note.")],
        figures=[
            Figure.of("short P90", ratio([value] * 5, [1.0] * 5), Bar(most=0.5)),
            Figure.of("other", ratio([1.0] * 5, [1.0] * 5)),
        ],
        pictures={f"{name}.svg": "A caption."},
        data={"nan": math.nan},
        command=f"python -m {name}",
        machine={"cpu": "x"},
        versions={"sglang": "1"},
        commit="abc",
    )


def sample(folder: Path, *names: str, value: float = 0.4) -> None:
    for name in names:
        piece(name, value).write(folder / name)
        (folder / name / f"{name}.svg").write_text("<svg/>")


def render(tmp_path: Path, *more: str) -> tuple[str, str]:
    """Render ``tmp_path / "from"`` and return (page, README)."""
    readme = tmp_path / "README.md"
    if not readme.exists():
        readme.write_text(README)
    argv = ["--from", str(tmp_path / "from"), "--out", str(tmp_path / "report"), "--readme", str(readme), *more]
    assert report.main(argv) == 0
    # The width of a column does not matter.
    narrow = (
        re.sub(r"(?<=\S) +(?=\|)|(?<=\|) +(?=\S)", " ", path.read_text())
        for path in (tmp_path / "report" / "README.md", readme)
    )
    return next(narrow), next(narrow)


def test_page_contains_tables_pictures_bars_and_missing_pieces(tmp_path: Path) -> None:
    sample(tmp_path / "from", "headline", "closed")
    text, _ = render(tmp_path)
    assert "| laps | 46 |" in text
    assert "short\\|P90" in text
    assert "| [Title of closed](#closed) | short P90 | 0.4 [0.4, 0.4] | 5 | <= 0.5 | met |" in text
    assert "![A caption.](headline.svg)" in text
    assert "`python -m closed`, seed 3." in text
    assert "cpu x, sglang 1: headline (abc), closed (abc)" in text
    leaves = {leaf for name, step in steps.STEPS.items() for leaf in step.pieces or (name,)}
    for name in leaves - {"headline", "closed"}:
        assert f"- **{name}**: not measured" in text
    assert "- **overload**: not measured (python -m benchmark.serve.headline --out out/report)" in text
    assert (tmp_path / "report" / "headline.svg").exists()


@pytest.mark.parametrize("name", steps.STEPS)
def test_every_step_command_accepts_configured_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = steps.STEPS[name]
    # Arguments before --help are parsed first.
    words = [*steps.command(name, step, Path("out"))[1:], "--help"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(servers, "execute", servers.execute)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delitem(sys.modules, step.module, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(step.module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0, capsys.readouterr().err


def test_bench_json_has_all_figures_and_raw_json_parses(tmp_path: Path) -> None:
    sample(tmp_path / "from", "headline", value=0.9)
    text, _ = render(tmp_path)
    bench = json.loads((tmp_path / "report" / "bench.json").read_text())
    assert [(f["piece"], f["name"], f["value"], f["low"], f["met"]) for f in bench["figures"]] == [
        ("headline", "short P90", 0.9, 0.9, False), ("headline", "other", 1.0, 1.0, None),
    ]  # fmt: skip
    assert "**MISSED**" in text
    raw = (tmp_path / "report" / "headline.json").read_text()
    assert json.loads(raw, parse_constant=pytest.fail)["data"] == {"nan": None}


def test_readme_update_between_markers_is_idempotent(tmp_path: Path) -> None:
    sample(tmp_path / "from", "headline")
    _, once = render(tmp_path)
    _, twice = render(tmp_path)
    assert once == twice
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once
    assert "| laps | 46 |" in once
    assert "![A caption.](report/headline.svg)" in once


@pytest.mark.parametrize(("value", "told"), [(0.4, "1 of 1 bars are met."), (0.9, "0 of 1 bars are met. Missed:")])
def test_readme_counts_bars_and_names_missed_bars(tmp_path: Path, value: float, told: str) -> None:
    sample(tmp_path / "from", "headline", value=value)
    _, readme = render(tmp_path)
    assert told in readme
    assert ("- short P90: 0.9 [0.9, 0.9], bar <= 0.5: **MISSED**" in readme) == (value == 0.9)


def test_readme_omits_page_only_columns() -> None:
    table = Table("T", ("variant", "short P90", page.PAGE_ONLY[0]), [("laps", "46", "99")], "A note.")
    shown = page.brief(table)
    assert (shown.title, list(shown.heads), shown.rows, shown.note) == (
        "T", ["variant", "short P90"], [["laps", "46"]], "A note.",
    )  # fmt: skip


def test_readme_shows_judged_figures_of_emulated_device(tmp_path: Path) -> None:
    sample(tmp_path / "from", "emulated")
    _, readme = render(tmp_path)
    assert "| | [measured](report/README.md#emulated) | bar | |" in readme
    assert "| short P90 | 0.4 [0.4, 0.4] | <= 0.5 | met |" in readme
    assert "| other |" not in readme
    assert "over 5 rounds" in readme
    assert "old" in readme


def test_readme_is_unchanged_without_headline(tmp_path: Path) -> None:
    sample(tmp_path / "from", "closed")
    assert render(tmp_path)[1] == README


@pytest.mark.parametrize("text", ["", BEGIN, END + BEGIN, README + README])
def test_each_marker_must_appear_exactly_once(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        page.put(text, page.HEADLINE, "x")


def test_page_names_broken_results_and_missing_pictures(tmp_path: Path) -> None:
    sample(tmp_path / "from", "headline", "closed")
    (tmp_path / "from" / "closed" / "piece.json").write_text("{")
    (tmp_path / "from" / "headline" / "headline.svg").unlink()
    text, _ = render(tmp_path)
    assert "- **closed**: its result cannot be read: JSONDecodeError" in text
    assert "- **headline: headline.svg**: the picture is not there" in text


def test_failed_step_is_missing_despite_older_result(tmp_path: Path) -> None:
    sample(tmp_path, "one", "two")
    found = steps.collect(tmp_path, {"one": "ended with code 1"}, {n: steps.Step("m") for n in ("one", "two")})
    assert list(found.pieces) == ["two"]
    assert found.missing == {"one": "ended with code 1"}


def test_failed_step_returns_exit_code_and_error(tmp_path: Path) -> None:
    said: list[str] = []
    wrong = steps.run("no", steps.Step("benchmark.no_such_module"), tmp_path, said.append)
    assert wrong is not None
    assert wrong.startswith("ended with code 1: ")
    assert "no_such_module" in wrong


def test_page_can_be_rebuilt_from_page_folder(tmp_path: Path) -> None:
    sample(tmp_path / "from", "headline", "closed")
    # The picture has the same name as another piece's picture.
    (tmp_path / "from" / "closed" / "headline.svg").write_text("<svg>another</svg>")
    odd = piece("closed")
    odd.pictures = {"headline.svg": "A caption."}
    odd.write(tmp_path / "from" / "closed")
    first = render(tmp_path)
    (tmp_path / "from").rename(tmp_path / "gone")
    (tmp_path / "report").rename(tmp_path / "from")
    again = render(tmp_path)
    assert again == first
    assert (tmp_path / "report" / "closed-headline.svg").read_text() == "<svg>another</svg>"
    (tmp_path / "report" / "README.md").unlink()
    argv = [
        "--from",
        str(tmp_path / "report"),
        "--out",
        str(tmp_path / "report"),
        "--readme",
        str(tmp_path / "README.md"),
    ]
    assert report.main(argv) == 0
    assert (tmp_path / "report" / "closed-headline.svg").exists()


def test_infinite_figure_is_json_null_and_reads_as_nan(tmp_path: Path) -> None:
    sample(tmp_path / "from", "headline", value=math.inf)
    render(tmp_path)
    kept = tmp_path / "report" / "headline.json"
    assert json.loads(kept.read_text(), parse_constant=pytest.fail)["figures"][0]["value"] is None
    assert math.isnan(Piece.read(kept).figures[0].value)


def test_committed_results_can_be_read() -> None:
    found = steps.collect(REPO / "benchmark" / "report", {})
    assert {"headline", "closed", "router-echo", "gpu-mixed", "sim-rules"} <= set(found.pieces)
    assert not [why for why in found.missing.values() if "cannot be read" in why]
    assert "gpu-graphs" in found.missing


def test_foreign_folder_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "mine.txt").write_text("precious")
    sample(tmp_path / "from", "headline")
    with pytest.raises(SystemExit):
        render(tmp_path)
    assert (tmp_path / "report" / "mine.txt").exists()
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--only", "nope"], "no step 'nope'"),
        (["--only", "closed", "--from", "/tmp"], "one of them"),
        (["--from", "/nowhere"], "not a folder"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        report.main(argv)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


def test_bar_is_met_at_limit_and_states_range() -> None:
    for bar, told, good, bad in (
        (Bar(most=0.5), "<= 0.5", 0.5, 0.51), (Bar(least=2.0), ">= 2", 2.0, 1.99),
        (Bar(least=0.85, most=1.15), "0.85..1.15", 1.15, 0.84),
    ):  # fmt: skip
        assert [Figure.of("f", v, bar).met for v in (good, bad)] == [True, False]
        assert Figure.of("f", good, bar).bar == told
    assert Figure.of("f", 1.0).met is None
    assert not Bar(most=1.0).met(math.nan)


def test_command_text_omits_paths_outside_repository() -> None:
    out = str(REPO / "out" / "x")
    assert command_text("m", ["--rounds", "3", "--out", "/somewhere/else"]) == "python -m m --rounds 3"
    assert command_text("./run bench m", ["--seed", "1"]) == "./run bench m --seed 1"
    assert command_text("m", ["--out", out, "--seed", "1"]) == "python -m m --out out/x --seed 1"


def test_piece_paths_are_relative_to_repository(tmp_path: Path) -> None:
    made = Piece("x", "X", "text", 0, [], [], data={"profile": str(REPO / "out" / "x.json")})
    made.write(tmp_path)
    assert Piece.read(tmp_path).data == {"profile": "out/x.json"}
