"""Fixtures for tests of the plugin."""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.fixture(scope="session")
def mixin() -> Any:
    """Return the mixin that LAPS puts before SGLang's scheduler. Imported late because SGLang's import is slow."""
    os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
    from sglang_laps.scheduler import LapsPrefillMixin

    return LapsPrefillMixin
