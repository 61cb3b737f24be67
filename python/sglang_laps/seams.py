"""Hooks on SGLang, and checks of every SGLang name that LAPS touches (``seams.txt``).

SGLang only logs a hook that it cannot apply, and continues without it. So names are checked before they are hooked, and
hooks after SGLang has applied them.
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from laps_core import __version__

from sglang_laps import compat
from sglang_laps.support import refuse

ROOT = "sglang.srt."


class Seam(NamedTuple):
    """One SGLang name."""

    name: str
    """Dotted name below ``sglang.srt``. In the file, the module stands above its names. A name in brackets is made by
    its class at run time, and not looked for."""
    use: str
    """hooked; replaced; overridden (by a subclass, or the class that is subclassed); set (an attribute of an instance
    or of the class); used (called in LAPS's own way); followed (LAPS's code does the same steps, so the source is
    checked)."""
    where: str
    """LAPS's module, or several."""
    expected: str | None
    """Expectation for the newest release (``compat``: for others). Function or class: its parameters (`name=` with a
    default). `followed`: digests of the source as released and as ``laps-patch apply --server`` has it. None (in the
    file -): the name only has to exist."""


def read_table(path: Path) -> tuple[Seam, ...]:
    """Return the table in a file, whose columns are at least two spaces apart."""
    found: list[Seam] = []
    module = ""
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith(" "):
            module = line
            continue
        name, use, where, expected = re.split(" {2,}", line.strip())
        found.append(Seam(f"{module}.{name}", use, where, None if expected == "-" else expected.strip("()")))
    return tuple(found)


SEAMS = read_table(Path(__file__).with_name("seams.txt"))
"""Every SGLang name that this package hooks, replaces, overrides, sets, uses or follows."""
_registered: set[str] = set()
"""Targets of the hooks that are registered in this process."""


def hook(name: str, call: Callable[..., Any], kind: str, table: Sequence[Seam] = SEAMS) -> None:
    """Register a hook on a name in `table`. `kind`: BEFORE, AFTER, AROUND, REPLACE. Raises KeyError for other names."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    use = "replaced" if kind == "REPLACE" else "hooked"
    if not any((s.name, s.use) == (name, use) for s in table):
        raise KeyError(f"{name} is not {use} by the table of seams")
    HookRegistry.register(ROOT + name, call, HookType[kind])
    _registered.add(ROOT + name)


def hooked(name: str) -> bool:
    """Return True if a hook of this name is registered in this process."""
    return ROOT + name in _registered


def wrong_release() -> str | None:
    """Return why the installed SGLang cannot be extended, or None. Imports the table's modules of an unknown
    release."""
    if compat.installed() in compat.RELEASES:
        return None
    wrong = next((why for seam in SEAMS if (why := changed(seam))), None)
    known, differs = " and ".join(compat.RELEASES), f", where {wrong}" if wrong else ""
    return f"sglang-laps {__version__} supports sglang {known}; found {compat.installed()}{differs}"


def require(table: Sequence[Seam] = SEAMS) -> None:
    """End the process with one line if a name in an imported module differs from SGLang's release."""
    wrong = next((why for seam in table if _imported(seam.name) and (why := changed(seam))), None)
    if wrong:
        refuse(f"this is not SGLang {compat.installed()} as it was released: {wrong}")


def require_applied() -> None:
    """End the process with one line if SGLang has not applied a hook. Call it after ``HookRegistry.apply_hooks``."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if lost := sorted(_registered - HookRegistry._patched):
        refuse(f"SGLang has not applied the hook of {lost[0]} (see the log)")


def _imported(name: str) -> bool:
    """Return True if the name's module is imported. Imports take seconds, and this process uses no other modules."""
    module = takewhile(str.islower, name.split(".")[:-1])
    return ROOT + ".".join(module) in sys.modules


def changed(seam: Seam) -> str | None:
    """Return how a name differs from SGLang's release, in a few words, or None. Imports the name's module."""
    name = seam.name.partition(".[")[0]
    owner, _, attribute = name.rpartition(".")
    if name in compat.release().missing:
        return None
    try:
        found = getattr(inspect.unwrap(pkgutil.resolve_name(ROOT + owner)), attribute)
    except (ImportError, AttributeError):
        return f"{ROOT}{name} is gone"
    if seam.expected is None:
        return None
    expected = compat.release().expected.get(name, seam.expected)
    if seam.use == "followed":
        return None if digest(found) in expected.split() else f"{ROOT}{name} has another body"
    takes = ", ".join(parameters(found))
    return None if takes == expected else f"{ROOT}{name} takes ({takes}), not ({expected})"


def digest(function: Any) -> str:
    """Return a digest of a function's source, for comparison; empty if the source cannot be read."""
    try:
        return hashlib.sha256(inspect.getsource(inspect.unwrap(function)).encode()).hexdigest()[:12]
    except OSError:
        return ""


def parameters(function: Any) -> Iterator[str]:
    """Yield the names of the parameters in the notation of ``Seam.expected``."""
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    star = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in found)
    for p in found:
        if p.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        yield marks.get(p.kind, "") + p.name + ("" if p.default is inspect.Parameter.empty else "=")
