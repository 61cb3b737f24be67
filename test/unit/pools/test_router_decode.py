"""Choice of the decode server: by its reported KV usage and by the requests sent there since the report."""

from __future__ import annotations

import random

import pytest
from laps_core.pools.choice import Pools, TriedServers
from laps_core.pools.config import AllocConfig
from laps_core.pools.decode import OTHERS_MAX, DecodeInstance, Kv, choose_decoder, estimate_traffic_ratio
from laps_core.pools.prefixes import Ask


def server(told: int | None = None, capacity: int = 100_000, own: int = 0, name: str = "d") -> DecodeInstance:
    """Return a server that has reported ``told`` used KV tokens; None: no report."""
    made = DecodeInstance(f"http://{name}:1", lambda: 0.0)
    if told is not None:
        made.kv = Kv(told, capacity, capacity, own)
    return made


def test_decode_server_with_most_free_tokens_is_chosen() -> None:
    full, free = server(80_000), server(20_000)
    with free.lease(1000):
        assert choose_decoder([full, free], 100, 1.0) is free


def test_decode_choice_compares_free_tokens_not_fractions() -> None:
    small, large = server(10_000, 50_000), server(60_000, 200_000)
    assert choose_decoder([small, large], 100, 1.0) is large


def test_tokens_sent_since_report_count_as_used() -> None:
    one, other = server(20_000), server(25_000)
    with one.lease(6000):
        assert choose_decoder([one, other], 100, 1.0) is other
    assert choose_decoder([one, other], 100, 1.0) is one, "and what has ended since is free"


def test_tokens_released_since_report_count_as_free() -> None:
    done, other = server(30_000, own=20_000), server(25_000)
    assert done.held() == 10_000
    assert choose_decoder([done, other], 100, 1.0) is done
    # At least the tokens of this router's own requests there.
    with done.lease(15_000):
        assert done.held(4.0) == 15_000


def test_held_tokens_include_all_outstanding_tokens() -> None:
    young = server(1000, own=8000)
    with young.lease(8000):
        assert young.held() == 8000


def test_too_small_decode_server_is_skipped_while_another_fits() -> None:
    small, large = server(0, 10_000), server(150_000, 200_000)
    assert choose_decoder([small, large], 20_000, 1.0) is large
    assert choose_decoder([small, large], 200, 1.0) is large
    assert choose_decoder([small], 20_000, 1.0) is small, "whether it is refused is the server's to say"
    silent = server()
    assert choose_decoder([small, silent], 20_000, 1.0) is silent


def test_request_must_fit_largest_dp_rank_of_decode_server() -> None:
    ranked = DecodeInstance("http://d:1", lambda: 0.0)
    ranked.kv = Kv(reported=0, capacity=40_000, largest_rank=10_000, own=0)
    assert choose_decoder([ranked, server(35_000, 40_000)], 15_000, 1.0) is not ranked
    assert choose_decoder([ranked, server(35_000, 40_000)], 10_000, 1.0) is ranked


def test_server_without_report_gets_smallest_reported_capacity() -> None:
    silent, small, large = server(), server(20_000, 50_000), server(100_000, 200_000)
    with silent.lease(10_000):
        # Free KV tokens: 40,000, 30,000 and 100,000.
        assert choose_decoder([silent, small], 100, 1.0) is silent
        assert choose_decoder([silent, small, large], 100, 1.0) is large
    with silent.lease(30_000):
        assert choose_decoder([silent, small], 100, 1.0) is small


def test_decode_server_with_fewest_tokens_is_chosen_without_reports() -> None:
    full, many = server(), server()
    with full.lease(30_000), many.lease(100), many.lease(100):
        assert choose_decoder([full, many], 100, 1.0) is many


def test_forget_clears_kv_report() -> None:
    one = server(90_000)
    one.forget()
    assert one.kv is None
    assert one.held() == 0


def test_choose_pair_considers_request_size() -> None:
    pools = Pools(
        [("http://p0:1", 1), ("http://p1:1", 1)], AllocConfig(), lambda: 0.0, decoders=["http://d0:1", "http://d1:1"]
    )
    small, large = pools.decoders
    small.kv, large.kv = Kv(0, 10_000, 10_000, 0), Kv(195_000, 200_000, 200_000, 0)
    for tokens, chosen in ((100, small), (12_000, large)):
        found = pools.choose_pair(Ask(10), TriedServers(), tokens)
        assert found is not None
        assert found[1] is chosen


def test_traffic_ratio_compares_reported_with_locally_sent_tokens() -> None:
    assert estimate_traffic_ratio([server(), server()]) == 1.0
    assert estimate_traffic_ratio([server(30_000, own=5000), server(10_000, own=5000)]) == 4.0
    assert estimate_traffic_ratio([server(100, own=5000)]) == 1.0
    assert estimate_traffic_ratio([server(5000)]) == OTHERS_MAX
    assert estimate_traffic_ratio([server(0)]) == 1.0


@pytest.mark.parametrize("routers", [1, 2, 8])
def test_concurrent_routers_fill_decode_servers_evenly(routers: int) -> None:
    """Requests live for ten reports; one server starts with fewer free KV tokens than the others."""
    rng = random.Random(routers)
    seats = [[server(0, 1_000_000, name=f"d{n}") for n in range(4)] for _ in range(routers)]
    held = [200_000, 0, 0, 0]
    alive: list[tuple[int, int, int, object]] = []
    worst = 0
    for period in range(60):
        for end, n, tokens, lease in [a for a in alive if a[0] == period]:
            held[n] -= tokens
            lease.__exit__()  # type: ignore[attr-defined]
            alive.remove((end, n, tokens, lease))
        if period == 10:
            held[0] -= 200_000
        for seat in seats:
            for d, h in zip(seat, held, strict=True):
                d.kv = Kv(h, 1_000_000, 1_000_000, d.outstanding_tokens)
        shares = [estimate_traffic_ratio(seat) for seat in seats]
        for k in range(64):
            seat, tokens = seats[k % routers], rng.randint(500, 1500)
            chosen = choose_decoder(seat, tokens, shares[k % routers])
            n = seat.index(chosen)
            lease = chosen.lease(tokens)
            lease.__enter__()
            held[n] += tokens
            alive.append((period + 10, n, tokens, lease))
        if period >= 30:
            worst = max(worst, max(held) - min(held))
    # 64,000 tokens arrive per period. If routers ignored each other, eight would be 60,000 tokens apart.
    assert worst < 10_000, worst
