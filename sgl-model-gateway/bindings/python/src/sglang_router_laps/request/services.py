"""What a request on its way uses of the router."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ..pools.pairs import Pairs
from ..servers.health import Health
from ..servers.upstream import Sessions
from ..telemetry.journal import Journal
from .aborts import Aborter
from .retries import RetryBudget, RetryConfig
from .tokens import TokenCounter


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """One for all requests."""

    pairs: Pairs
    sessions: Sessions
    health: Health
    aborter: Aborter
    counter: TokenCounter
    journal: Journal
    retries: RetryConfig
    budget: RetryBudget
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Runs what nobody waits for."""
