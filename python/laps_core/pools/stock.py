"""Reports of stock servers: load, and the ranks that requests can be sent to."""

from __future__ import annotations

import msgspec

from laps_core.protocol import Count, read

LOADS = "v1/loads?include=core"
"""Load route of stock servers."""
SERVER_INFO = "server_info"
BY_ROOM = "follow_bootstrap_room"
"""Value of SGLang's --load-balance-method: the bootstrap room of a request selects its rank."""


class Missing(Exception):
    """The server has no such route, or the answer lacks the needed figures."""


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one data-parallel rank in ``LOADS`` (tokens, microseconds)."""

    dp_rank: Count = 0
    num_waiting_uncached_tokens: Count | None = None
    """New tokens that wait for prefill."""
    total_prefill_busy_us: Count = 0
    num_total_tokens: Count | None = None
    """KV tokens in use, and requested by waiting requests."""
    max_total_num_tokens: Count = 0
    """KV tokens that the rank can hold."""


class _Loads(msgspec.Struct, frozen=True):
    loads: list[RankLoad]


class _ServerInfo(msgspec.Struct, frozen=True):
    dp_size: Count
    attn_dp_size: Count = 1
    load_balance_method: str = ""


def read_loads(text: bytes) -> list[RankLoad]:
    """Return one load per rank. Raises ValueError for an invalid answer, and Missing for an answer without ranks."""
    ranks = read(text, _Loads).loads
    if not ranks:
        raise Missing
    return ranks


def count_ranks(text: bytes) -> int:
    """Return the number of ranks from which the bootstrap room selects, by the answer of ``SERVER_INFO``; 1 if the
    server selects them in another way. Raises ValueError for an invalid answer."""
    said = read(text, _ServerInfo)
    return said.dp_size * said.attn_dp_size if said.load_balance_method == BY_ROOM else 1
