"""The two prefill pools: which instance gets a request, and how an instance changes pools."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sglang_laps.policy.pressure import POOLS, Move, Pool

from .config import AllocConfig
from .instances import Clock, PrefillInstance, open_to
from .prefixes import Fingerprint

FLOOD = 8
"""A pool with this many times ``spill_tokens`` in flight everywhere need not find an idle instance to spill long
requests to: one with as many times less in flight does."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and what it is taken for."""

    instance: PrefillInstance
    length_class: Pool
    new_tokens: int
    """Tokens expected to be computed there (>= 1)."""
    spilled: bool = False
    """It went to the other pool because its own is overloaded or has nobody healthy."""


class Pools:
    """Prefill instances by pool. An instance that moves drains by itself: only new requests follow."""

    def __init__(self, servers: Sequence[tuple[str, int | None]], config: AllocConfig, clock: Clock = time.monotonic):
        """``servers``: (url, bootstrap port) of each. Raises ConfigError when they do not fit ``config``."""
        config.check_instances(len(servers))
        self.config = config
        n_short = config.initial_short or max(config.pressure.n_min, len(servers) // 2)
        self.instances = [
            PrefillInstance(url, port, "short" if i < n_short else "long", config.prefix_tokens, clock)
            for i, (url, port) in enumerate(servers)
        ]

    def members(self, pool: Pool) -> list[PrefillInstance]:
        """All instances of ``pool``, healthy or not."""
        return [i for i in self.instances if i.pool == pool]

    def by_url(self, url: str) -> PrefillInstance:
        """The instance at ``url``."""
        return next(i for i in self.instances if i.url == url)

    def apply(self, move: Move) -> None:
        """Carry out a move of the controller."""
        self.by_url(move.name).pool = move.target

    def choose(
        self, tokens: int, prompt: Sequence[Fingerprint] = (), avoid: Collection[PrefillInstance] = ()
    ) -> Choice | None:
        """The instance for a request of ``tokens`` tokens; None when nobody is healthy.

        Short is what leaves at most the threshold to compute. It goes to the short pool if that holds there; a
        request that is short only where its history lies goes to where its history lies. Instances in ``avoid``
        are taken only when there is no other.
        """
        usable = open_to(self.instances, avoid)
        if not usable:
            return None
        known = [p for p in prompt if p.hashes]
        # Of a batch, the share is the mean over its prompts: an estimate that needs no lengths.
        held = {i: sum(i.prefixes.held(p) for p in known) / len(prompt) for i in usable} if known else {}
        length_class, home = self._classify(tokens, usable, held)
        candidates = [i for i in usable if i.pool == home]
        spilled = not candidates
        if spilled:
            candidates = usable
        elif home == length_class:
            # What is short only where its history lies would be long elsewhere.
            relief = self._relief(home, candidates, usable)
            if relief:
                candidates, spilled = relief, True
        chosen = self._prefer(candidates, held)
        for item in known:
            chosen.prefixes.add(item)
        return Choice(chosen, length_class, _new(tokens, held.get(chosen, 0.0)), spilled)

    def _classify(
        self, tokens: int, usable: list[PrefillInstance], held: dict[PrefillInstance, float]
    ) -> tuple[Pool, Pool]:
        """(class, pool) of a request."""
        threshold = self.config.threshold
        if tokens <= threshold:
            return "short", "short"
        fewest: dict[Pool, int] = dict.fromkeys(POOLS, tokens)
        for i, share in held.items():
            fewest[i.pool] = min(fewest[i.pool], _new(tokens, share))
        if fewest["short"] <= threshold:
            return "short", "short"
        return ("short" if fewest["long"] <= threshold else "long"), "long"

    def _relief(self, home: Pool, own: list[PrefillInstance], usable: list[PrefillInstance]) -> list[PrefillInstance]:
        """Instances of the other pool that may take a request whose ``own`` pool is overloaded."""
        least = min(i.outstanding_tokens for i in own)
        if least <= self.config.spill_tokens:
            return []
        others = [i for i in usable if i.pool != home and self._may_spill(home, i)]
        idle = [i for i in others if not i.outstanding]
        if idle or home == "short" or least <= FLOOD * self.config.spill_tokens:
            return idle
        return [i for i in others if i.outstanding_tokens * FLOOD <= least]

    def _may_spill(self, home: Pool, to: PrefillInstance) -> bool:
        if self.config.spill == "auto":
            return home == "short" or to.parks
        return self.config.spill in ("both", home)

    def _prefer(self, candidates: list[PrefillInstance], held: dict[PrefillInstance, float]) -> PrefillInstance:
        least = min(candidates, key=lambda i: (i.outstanding_tokens, i.outstanding, i.served_tokens))
        if not held:
            return least
        holder = max(candidates, key=lambda i: (held[i], -i.outstanding_tokens))
        if held[holder] <= held[least]:
            return least
        mean = sum(i.outstanding_tokens for i in candidates) / len(candidates)
        # The threshold's worth of slack keeps a nearly idle pool from scattering conversations.
        limit = self.config.prefix_load_factor * mean + self.config.threshold
        return holder if holder.outstanding_tokens <= limit else least


def _new(tokens: int, held: float) -> int:
    return max(1, round(tokens * (1 - held)))
