"""The report's page: Markdown from pieces, and every ratio in one JSON file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import orjson

from benchmark.results.piece import Figure, Piece, Table
from benchmark.results.steps import Collected

HEADLINE, EMULATED = "headline", "emulated"
"""Pieces shown in the README, each between markers with its name."""
BENCH = "bench.json"
"""File with all ratios."""
HEADLINE_FIGURES = 5
"""Number of judged figures of a piece that the README shows."""
PAGE_ONLY = ("short P99", "long P99", "tokens/s", "failed")
"""Columns of the headline's table that only the page shows."""
TOLD = {True: "met", False: "**MISSED**", None: ""}


def cell(text: str) -> str:
    """Return ``text`` escaped for a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return Table("", list(map(cell, heads)), [list(map(cell, row)) for row in rows]).grid("pipe")


def markdown(table: Table) -> str:
    """Return title, table and note."""
    return "\n\n".join(filter(None, (f"**{table.title}**", grid(table.heads, table.rows), table.note)))


def value(figure: Figure) -> str:
    """Return the figure's value and interval as text."""
    spread = "" if figure.low is None or figure.high is None else f" [{figure.low:.3g}, {figure.high:.3g}]"
    return f"{figure.value:.3g}{spread}"


def bars(pieces: Mapping[str, Piece]) -> str:
    """Return a table of all figures with a bar."""
    rows = [
        (f"[{p.title}](#{name})", f.name, value(f), str(f.rounds or ""), f.bar, TOLD[f.met])
        for name, p in pieces.items()
        for f in p.figures
        if f.bar
    ]
    return grid(("piece", "figure", "value", "rounds", "bar", ""), rows) if rows else "No piece has a bar."


def judged(figures: Sequence[Figure]) -> str:
    """Return the figures with a bar, as a list."""
    return "\n".join(f"- {f.name}: {value(f)}, bar {f.bar}: {TOLD[f.met]}" for f in figures if f.bar)


def section(name: str, piece: Piece) -> str:
    parts = [f'<a id="{name}"></a>\n\n## {piece.title}', piece.text, f"`{piece.command}`, seed {piece.seed}."]
    parts += [*filter(None, [judged(piece.figures)]), *map(markdown, piece.tables)]
    parts += [f"![{caption}]({picture_name(name, file)})\n\n{caption}" for file, caption in piece.pictures.items()]
    other = [f for f in piece.figures if not f.bar]
    if other:
        rows = [(f.name, value(f), str(f.rounds or ""), f.verdict) for f in other]
        table = grid(("figure", "value", "rounds", "shown"), rows)
        parts.append(f"<details><summary>{len(other)} more figures</summary>\n\n{table}\n\n</details>")
    parts.append(f"Raw: [{name}.json]({name}.json)")
    return "\n\n".join(parts)


def picture_name(name: str, file: str) -> str:
    """Return the name of a picture beside the page."""
    return file if file.startswith(name) else f"{name}-{file}"


def machines(pieces: Mapping[str, Piece]) -> str:
    """Return a list of machines with their versions, and the pieces measured there, each with its commit."""
    groups: dict[str, list[str]] = {}
    for name, piece in pieces.items():
        told = ", ".join(f"{k} {v}" for k, v in {**piece.machine, **piece.versions}.items()) or "not recorded"
        groups.setdefault(told, []).append(f"{name} ({piece.commit})" if piece.commit else name)
    return "\n".join(f"- {told}: {', '.join(names)}" for told, names in groups.items()) or "- none"


def page(collected: Collected) -> str:
    pieces = {name: piece for name, (piece, _) in collected.pieces.items()}
    parts = [
        "# What was measured",
        "Written by `./run report` from the results of the commands below; nothing here is typed by hand. A ratio is "
        "the median of per-round ratios, with the interval that covers that median; `not shown` means that the rounds "
        "do not support a difference. Every median ratio with its spread is in [bench.json](bench.json).",
        "## Bars",
        bars(pieces),
        "## Missing",
        "\n".join(f"- **{name}**: {cell(why)}" for name, why in collected.missing.items()) or "Nothing.",
        "## Machine and versions",
        "In parentheses the commit; a plus: with changes.",
        machines(pieces),
        *(section(name, piece) for name, piece in pieces.items()),
    ]
    return "\n\n".join(parts) + "\n"


def write(collected: Collected, out: Path) -> None:
    """Write README.md, bench.json, raw JSON and pictures in place of an earlier page.

    Raises ValueError if the folder holds anything but a page.
    """
    files: dict[str, bytes] = {}
    for name, (piece, folder) in collected.pieces.items():
        # orjson writes infinite values and NaN as null.
        files[f"{name}.json"] = orjson.dumps(piece) + b"\n"
        for file in list(piece.pictures):
            kept = picture_name(name, file)
            there = next((path for path in (folder / kept, folder / file) if path.exists()), None)
            if there:
                files[kept] = there.read_bytes()
            else:
                del piece.pictures[file]
                collected.missing[f"{name}: {file}"] = "the picture is not there"
    # Everything has been read by now: an earlier page may be the source of this one.
    if out.exists() and any(out.iterdir()):
        if not (out / BENCH).exists():
            raise ValueError(f"{out} holds files but no {BENCH}: not a page to be replaced")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (out / file).write_bytes(content)
    (out / "README.md").write_text(page(collected))
    figures = [
        {"piece": name, "commit": piece.commit, **asdict(figure)}
        for name, (piece, _) in collected.pieces.items()
        for figure in piece.figures
    ]
    told = orjson.loads(orjson.dumps({"figures": figures, "missing": collected.missing}))
    (out / BENCH).write_text(json.dumps(told, indent=1) + "\n")


def markers(name: str) -> tuple[str, str]:
    """Return the comments that enclose a piece in the README."""
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def brief(table: Table) -> Table:
    """Return the table without the columns of ``PAGE_ONLY``."""
    kept = [i for i, head in enumerate(table.heads) if head not in PAGE_ONLY]
    return replace(table, heads=[table.heads[i] for i in kept], rows=[[row[i] for i in kept] for row in table.rows])


def judged_first(piece: Piece) -> list[Figure]:
    """Return the judged figures that the README shows."""
    return [f for f in piece.figures if f.bar][:HEADLINE_FIGURES]


def emulated(piece: Piece, folder: str) -> str:
    """Return the text between the README's markers: the first judged figures. ``folder``: path from the README to the
    page."""
    rows = [(f.name, value(f), f.bar, TOLD[f.met]) for f in judged_first(piece)]
    table = grid(("", f"[measured]({folder}/README.md#{piece.name})", "bar", ""), rows)
    return f"{table}\n\nIn brackets the interval over {piece.figures[0].rounds} rounds."


def headline(piece: Piece, folder: str) -> str:
    """Return the text between the README's markers: the piece's first table without PAGE_ONLY, the number of its first
    bars that are met, its missed bars, its pictures, and the first sentence of its text. ``folder``: as for
    ``emulated``."""
    judged_figures = judged_first(piece)
    missed = [f for f in judged_figures if not f.met]
    count = f"{len(judged_figures) - len(missed)} of {len(judged_figures)} bars are met." + (
        " Missed:" if missed else ""
    )
    lines = [markdown(brief(piece.tables[0])), count, *([judged(missed)] if missed else [])]
    lines += [f"![{c}]({folder}/{picture_name(HEADLINE, file)})" for file, c in piece.pictures.items()]
    load = piece.text.split(". ")[0].rstrip(".")
    lines.append(f"{load}. `./run bench` measures it again; method and more figures: [the report]({folder}/README.md).")
    return "\n\n".join(lines)


IN_README = {EMULATED: emulated, HEADLINE: headline}
"""Piece in the README -> function that returns its text."""


def put(text: str, name: str, content: str) -> str:
    """Return ``text`` with ``content`` between the markers of ``name``. Raises ValueError unless both occur once."""
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the markers {begin} and {end} are not there once each, in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"
