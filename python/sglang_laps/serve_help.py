"""Show the LAPS flags in ``sglang serve --help``, which prints its help without loading plugins."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

SERVER_ARGS = "sglang.srt.server_args"


def show_flags_in_serve_help(argv: Sequence[str]) -> None:
    """Load plugins early if `argv` asks for the help of ``sglang serve``.

    Called while SGLang resolves its platform, which is early: plugins are loaded once ``server_args`` is imported.
    """
    if "serve" in argv and {"-h", "--help"} & set(argv) and SERVER_ARGS not in sys.modules:
        sys.meta_path.insert(0, _LoadPluginsAfter(SERVER_ARGS))


class _LoadPluginsAfter(importlib.abc.MetaPathFinder):
    """Loads SGLang's plugins once, right after the import of one module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            from sglang.srt.plugins import load_plugins

            execute(module)
            load_plugins()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
