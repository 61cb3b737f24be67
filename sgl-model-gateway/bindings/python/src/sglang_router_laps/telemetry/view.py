"""What status, metrics and page read: the parts of a running router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import AllocConfig
from ..pools.control import Control
from ..pools.pairs import Pairs
from ..servers.instances import Instance
from ..servers.places import Places
from ..servers.signals import SignalReader
from ..servers.supervisor import Supervisor
from .history import History
from .journal import Journal


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Nothing here is changed by reading it."""

    config: AllocConfig
    pairs: Pairs
    instances: Sequence[Instance]
    readers: Sequence[SignalReader]
    control: Control
    history: History
    journal: Journal
    places: Places
    supervisor: Supervisor
    tokens: Callable[[], dict[str, Any]]
    """How tokens are counted, JSON-ready."""
    started_at: float
    """On the monotonic clock (seconds)."""
