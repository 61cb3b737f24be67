"""Mutation check of the pure modules: does a unit test fail if one operator is replaced by another?

    ./run mutants                                                     # all of them: half an hour
    ./run mutants python/laps_core/busy.py                            # a file, or a folder
    ./run mutants python/laps_core/busy.py test/unit/plugin/test_core.py     # with these tests only

A mutant has one changed operator: a comparison, arithmetic, ``and``, ``or``, ``not``. Mutants are made in memory and
tested in forks of one process that has loaded the libraries. A first run records which tests enter which function. The
tests of a mutant's function then run, quick ones first, until one fails. mutants.toml lists the mutants that change no
behaviour to rely on, with the reason. Exit code 1: fewer than 90% are killed, a survivor is not in that file, or an
entry of the file is no mutant any more.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import aiohttp  # noqa: F401
import hypothesis
import numpy  # noqa: F401
import pytest
import scipy.optimize  # noqa: F401
from tabulate import tabulate
from tqdm import tqdm

REPO = Path(__file__).parents[1]
ROUTER = REPO / "sgl-model-gateway/bindings/python/src/sglang_router_laps"
PURE = sorted((REPO / "python/laps_core").rglob("*.py")) + [
    ROUTER / name for name in ("prompts/reading.py", "prompts/tokens.py")
]
BAR = 0.9
QUICK = 25
"""Number of tests that run first; most mutants do not survive these."""
MOST_S = 60.0
"""Most time for the tests of one mutant (seconds, as measured in the first run); slower tests beyond it do not run."""
PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or),
)  # fmt: skip
SWAPS: dict[type[ast.AST], type[ast.AST]] = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])} | {
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One operator of one file, changed."""

    file: Path
    line: int
    function: int
    """First line of the enclosing function; 0 if there is none."""
    change: str
    code: CodeType


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    tree = ast.parse(file.read_text())
    for node, function in _inside(tree, 0):
        for name, value in _changes(node):
            before, kept = ast.unparse(node), getattr(node, name)
            setattr(node, name, value)
            change = f"{before} -> {ast.unparse(node)}"
            code = compile(ast.fix_missing_locations(tree), str(file), "exec")
            setattr(node, name, kept)
            yield Mutant(file, node.lineno, function, change, code)


def _inside(node: ast.AST, function: int) -> Iterator[tuple[Any, int]]:
    """Yield every node except annotations, with the first line of its function."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = min(n.lineno for n in (node, *node.decorator_list))
    yield node, function
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                yield from _inside(child, function)


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield changes of a node: (field, new value)."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield "ops", [*node.ops[:i], SWAPS[type(op)](), *node.ops[i + 1 :]]
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
        yield "op", SWAPS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Invert):
        # Applied twice, an operator has no effect; this works for every type.
        yield "operand", ast.UnaryOp(node.op, node.operand)


class Trace:
    """Plugin of pytest that records each test's time (seconds) and the functions of the pure modules that it enters."""

    def __init__(self, to: Path) -> None:
        self._to, self._found, self._failed = to, dict[str, Any](), list[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        names, entered, begin = {str(f) for f in PURE}, set[tuple[str, int]](), time.perf_counter()

        def note(frame: FrameType, *_: object) -> None:
            if (code := frame.f_code).co_filename in names:
                entered.add((code.co_filename, code.co_firstlineno))

        sys.settrace(note)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self._found[item.nodeid] = time.perf_counter() - begin, [*entered]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._to.write_text(json.dumps(self._failed or self._found))


class Chosen:
    """Plugin of pytest that keeps only these tests, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._rank = {test: i for i, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self._rank), key=lambda i: self._rank[i.nodeid])


def forked(work: Callable[[], int], limit_s: float) -> int | None:
    """Run ``work`` in a fork and return its exit code; None if it was not done within ``limit_s``."""
    if not (pid := os.fork()):
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.setsid()
        try:
            os._exit(work())
        finally:
            os._exit(70)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def tested(mutant: Mutant | None, paths: Sequence[str], plugin: object) -> int:
    """Run tests with the mutant in place of its file and return pytest's exit code."""
    stock = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        return mutant.code if mutant and Path(self.path) == mutant.file else stock(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *paths], plugins=[plugin]))


def survives(mutant: Mutant, tests: Sequence[tuple[float, str]]) -> bool:
    """Return True if no test fails. ``tests``: (seconds, id); the slowest beyond ``MOST_S`` in total are skipped."""
    tests = sorted(tests)
    tests = [t for t, so_far in zip(tests, accumulate(s for s, _ in tests), strict=True) if so_far <= MOST_S]
    names = [name for _, name in tests]
    for some in (names[:QUICK], names[QUICK:]):
        files = sorted({name.partition("::")[0] for name in some})
        limit_s = 15.0 + 2.0 * sum(s for s, name in tests if name in some)
        if files and forked(lambda some=some, files=files: tested(mutant, files, Chosen(some)), limit_s) != 0:  # type: ignore[misc]
            return False
    return True


def main(argv: Sequence[str]) -> int:
    """Check the files and folders of ``argv``. Return 0 if enough mutants are killed and all others are explained."""
    os.chdir(REPO)
    paths = [Path(a).resolve() for a in argv]
    suite = [str(p) for p in paths if (REPO / "test") in p.parents] or ["test/unit"]
    wanted = [p for p in paths if str(p) not in suite] or [REPO]
    files = [f for f in PURE if any(p == f or p in f.parents for p in wanted)]
    explained = tomllib.loads((REPO / "test/mutants.toml").read_text())
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", database=None, derandomize=True, deadline=None, max_examples=30, phases=phases
    )
    hypothesis.settings.load_profile("mutants")
    with contextlib.redirect_stdout(io.StringIO()):
        # Load pytest's plugins for all forks, but none of our modules.
        pytest.main(["--collect-only", "-p", "no:cacheprovider", "test/unit/repository/test_links.py"])
    print("which tests enter which function ...", file=sys.stderr)
    with tempfile.NamedTemporaryFile() as found:
        if forked(lambda: tested(None, suite, Trace(Path(found.name))), 3600.0) != 0:
            raise SystemExit(f"mutants: a test fails without any mutant: {Path(found.name).read_text()}")
        runs: dict[str, tuple[float, list[tuple[str, int]]]] = json.loads(Path(found.name).read_bytes())
    entering: dict[tuple[str, int], set[tuple[float, str]]] = defaultdict(set)
    for test, (seconds, functions) in runs.items():
        for entered, line in functions:
            for key in ((entered, line), (entered, 0)):
                entering[key].add((seconds, test))
    rows: list[tuple[str, int, int, str]] = []
    unexplained, gone = list[str](), list[str]()
    total = {f: sum(1 for _ in mutants(f)) for f in files}
    with tqdm(total=sum(total.values())) as bar:
        for file in files:
            name, left = str(file.relative_to(REPO)), list[Mutant]()
            stale = {*explained.get(name, {})}
            for mutant in mutants(file):
                stale.discard(mutant.change)
                near = entering[str(file), mutant.function] or entering[str(file), 0]
                if survives(mutant, list(near)):
                    left.append(mutant)
                    bar.write(f"{name}:{mutant.line}: {mutant.change}")
                bar.update()
            killed = total[file] - len(left)
            rows.append((name, total[file], killed, f"{killed / total[file]:.0%}" if total[file] else ""))
            unexplained += [f"{name}:{m.line}: {m.change}" for m in left if m.change not in explained.get(name, {})]
            gone += [f"{name}: {change}" for change in sorted(stale)]
    every, killed = sum(r[1] for r in rows), sum(r[2] for r in rows)
    rows.append(("all", every, killed, f"{killed / max(1, every):.1%}"))
    print(tabulate(rows, ("file", "mutants", "killed", "")))
    print(*(["", "alive and not explained:", *unexplained] if unexplained else []), sep="\n")
    print(*(["", "explained, and no mutant any more:", *gone] if gone else []), sep="\n")
    return int(bool(unexplained or gone) or killed < BAR * every)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
