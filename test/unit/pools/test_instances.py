"""A server in the router's view: answers, losses, rests, busy time, ranks and lateness."""

from __future__ import annotations

import math

import pytest
from laps_core.pools.instances import RECENT, REST_S, TOGETHER_S, Instance, open_to
from laps_core.pools.prefill import SPAN_S, PrefillInstance
from laps_core.pools.ranks import RANKS_MAX
from laps_core.protocol import PoolRecord


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Leg:
    ended = False

    def cancel(self) -> None:
        self.ended = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> PrefillInstance:
    return PrefillInstance("http://h:1/", 8998, clock=clock)


def test_answers_are_counted_and_averaged_into_latency(server: Instance) -> None:
    server.note_answer(2.0)
    assert (server.answers, server.answers_s, server.latency_s) == (1, 2.0, 2.0)
    server.note_answer(4.0)
    assert (server.answers, server.answers_s) == (2, 6.0)
    assert server.latency_s == pytest.approx(2.0 + RECENT * 2.0)


def test_resting_server_becomes_usable_again(server: Instance, clock: Clock) -> None:
    server.rest()
    assert not server.usable
    clock.now += REST_S
    assert server.usable


def test_note_lost_considers_other_lost_or_running_requests(server: Instance, clock: Clock) -> None:
    assert not server.note_lost()
    clock.now += 0.5 * TOGETHER_S
    assert server.note_lost()
    clock.now += TOGETHER_S
    assert not server.note_lost()
    clock.now += 10 * TOGETHER_S
    with server.lease(10):
        assert server.note_lost()


def test_cut_cancels_request_waiting_for_first_token(server: Instance) -> None:
    leg = Leg()
    with server.lease(10) as lease, server.lease(20):
        lease.leg = leg
        server.cut()
    assert leg.ended


def test_leases_count_work_in_flight_once_and_release_once(server: Instance, clock: Clock) -> None:
    with server.lease(10) as first:
        clock.now += 1.0
        with server.lease(20):
            clock.now += 2.0
            assert (server.outstanding, server.outstanding_tokens, server.busy_seconds()) == (2, 30, 3.0)
        clock.now += 4.0
        first.end()
        first.end()
    assert (server.outstanding, server.outstanding_tokens, server.busy_seconds()) == (0, 0, 7.0)
    assert (server.served, server.served_tokens) == (2, 30)
    clock.now += 10.0
    with server.lease(1):
        clock.now += 1.0
        assert server.busy_seconds() == 8.0


def test_pool_record_sets_pool_only_if_assigned(server: PrefillInstance, clock: Clock) -> None:
    assert server.record_at == -math.inf
    server.adopt_record(PoolRecord(assignment="long", version=3))
    assert (server.pool, server.record_at) == ("long", clock.now)
    for record in (PoolRecord(version=4), None):
        server.adopt_record(record)
        assert (server.pool, server.record) == ("long", record)


def test_server_tracks_maximum_number_of_dp_ranks(server: PrefillInstance) -> None:
    server.set_rank_count(RANKS_MAX)
    assert len(server.places) == RANKS_MAX


def test_ttft_deviation_decays_over_time(server: PrefillInstance, clock: Clock) -> None:
    server.note_ttft(0.8, 0.4)
    assert server.deviation == pytest.approx(0.2)
    clock.now += SPAN_S
    assert server.deviation == pytest.approx(0.1)
    server.note_ttft(0.8, 0.4)
    assert server.deviation == pytest.approx(0.2 * 0.4 + 0.6)


def test_avoided_server_is_used_only_without_healthy_alternative(clock: Clock) -> None:
    first, second = (PrefillInstance(f"http://h:{i}", 1, clock=clock) for i in (1, 2))
    for server in (first, second):
        server.rest()
    assert open_to([first, second], [first]) == [second]
    assert open_to([first], [first]) == [first]
