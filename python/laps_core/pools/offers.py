"""Offers of places for a request: the cost of each place, the best offer, and the relief of an overloaded pool."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from laps_core.latency.step import Coefficients
from laps_core.length import SHORT
from laps_core.pools.config import AllocConfig
from laps_core.pools.prefill import Place, PrefillInstance
from laps_core.pools.prefixes import Ask
from laps_core.pools.pressure import BOTH, Pool

EASE = 0.5
"""Largest predicted TTFT that meets a deadline with ease (share of the deadline, 0..1): predictions have errors."""
Offer = tuple[float, int, Place, float]
"""Cost of a place (seconds), the request's new tokens there, the place (server or rank), and the part of the cost that
other requests bear (seconds)."""
BEHIND = 3.0
"""Weight of a request's work in the cost, beside its own wait, because later requests wait for that work. Without this
weight, requests would too often leave a cached prefix and compute it again."""
_cost = itemgetter(0)
FLOOD = 8
"""Load of an overloaded pool from which long requests spill to busy places, too (multiples of ``load_unit`` in flight
at each of its places). Such a busy place has at most 1 / FLOOD of that load."""


def list_offers(
    usable: Sequence[PrefillInstance], ask: Ask, now: float, threshold: int
) -> tuple[list[Offer], list[Offer]]:
    """Return the offers of the request's own pool, and those of the other pool. If a server has
    idle places without a cached part of the prompt, only the one that has served the fewest tokens is listed."""
    total = max(1, ask.total)
    short_anew = total <= threshold
    own: list[Offer] = []
    others: list[Offer] = []
    heads = {p.hashes[0] for p in ask.prompts if p.hashes}
    head, several = next(iter(heads), 0), len(heads) > 1
    model: Coefficients | None = None
    step_s = work_s = behind_s = 0.0
    for i in usable:
        pool = i.pool
        free: Place | None = None
        busy: list[Place] = []
        for place in i.places:
            blocks = place.prefixes.blocks
            if not blocks.keys().isdisjoint(heads) if several else head in blocks:
                new = ask.new(place.prefixes)
                short = new <= threshold
                here = place.outlook.model
                took_s = here.work_s(new, total - new)
                first_s, delay_s = place.outlook.costs_s(now, here.step_s, took_s, short)
                others_s = delay_s + BEHIND * took_s
                offer = first_s + others_s, new, place, others_s
                # A request that is short only because its history is cached at this place belongs here.
                at_home = pool == BOTH or (pool == SHORT) == short or (short and not short_anew)
                (own if at_home else others).append(offer)
            elif place.outlook.free_at > now or place.outstanding:
                busy.append(place)
            elif free is None or place.served_tokens < free.served_tokens:
                free = place
        if free is None and not busy:
            continue
        if i.outlook.model is not model:
            # Compute these once for consecutive servers with the same model; those that report none share one.
            model = i.outlook.model
            step_s, work_s = model.step_s, model.work_s(total, 0)
            behind_s = BEHIND * work_s
        mine = own if pool == BOTH or (pool == SHORT) == short_anew else others
        if free is not None:
            mine.append((step_s + work_s + behind_s, total, free, behind_s))
            continue
        for place in busy:
            first_s, delay_s = place.outlook.costs_s(now, step_s, work_s, short_anew)
            others_s = delay_s + behind_s
            mine.append((first_s + others_s, total, place, others_s))
    return own, others


def choose_offer(offers: list[Offer], ask: Ask) -> Offer:
    """Return the cheapest offer; if several meet the deadline with ease, the one with the fewest new tokens."""
    if ask.slo_s is not None:
        easy = [o for o in offers if o[0] - o[3] <= EASE * ask.slo_s]
        if easy:
            return min(easy, key=lambda o: (o[1], o[0], *_load(o[2])))
    return cheapest_offer(offers)


def spill_offers(config: AllocConfig, home: Pool, own: list[Offer], others: list[Offer]) -> list[Offer]:
    """Return the offers of the other pool that may take the request, if its ``own`` pool (``home``) is overloaded."""
    unit = config.load_unit
    fewest = min(o[2].outstanding_tokens for o in own)
    if fewest <= unit:
        return []
    able = [o for o in others if _may_spill(config, home, o[2])]
    idle = [o for o in able if not o[2].outstanding]
    if idle or home == SHORT or fewest <= FLOOD * unit:
        return idle
    return [o for o in able if o[2].outstanding_tokens * FLOOD <= fewest]


def _may_spill(config: AllocConfig, home: Pool, to: Place) -> bool:
    if config.spill == "auto":
        return home == SHORT or to.outlook.parks
    return config.spill in ("both", home)


def cheapest_offer(offers: list[Offer]) -> Offer:
    """Return the cheapest offer; of equally cheap ones, the one whose place has the fewest tokens in flight."""
    lowest_s = min(offers, key=_cost)[0]
    return min((o for o in offers if o[0] == lowest_s), key=lambda o: _load(o[2]))


def _load(p: Place) -> tuple[int, int, int]:
    return p.outstanding_tokens, p.outstanding, p.served_tokens
