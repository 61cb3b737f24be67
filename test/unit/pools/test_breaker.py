"""Circuit breaker of a server: conditions to open, to try and to close."""

from __future__ import annotations

from laps_core.pools.breaker import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def open_breaker() -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(failures=3, successes=2, timeout_s=10, window_s=30, clock=clock), clock


def test_breaker_opens_half_opens_and_closes() -> None:
    b, clock = open_breaker()
    for _ in range(3):
        assert b.admits()
        b.failed()
    assert (b.state, b.admits()) == ("open", False)
    clock.now = 9.9
    assert not b.admits()
    clock.now = 10.0
    assert (b.admits(), b.state) == (True, "half_open")
    assert b.enter()
    assert b.admits()
    assert b.enter()
    # No more requests on trial than required successes.
    assert not b.admits()
    b.succeeded()
    b.leave()
    assert b.admits()
    b.succeeded()
    b.leave()
    assert (b.state, b.enter()) == ("closed", False)


def test_failure_in_half_open_state_reopens_breaker() -> None:
    b, clock = open_breaker()
    for _ in range(3):
        b.failed()
    clock.now = 10.0
    assert b.admits()
    b.failed()
    assert b.state == "open"
    clock.now = 19.9
    assert not b.admits()
    clock.now = 20.0
    assert b.admits()


def test_successes_offset_failures_and_old_failures_expire() -> None:
    b, clock = open_breaker()
    for _ in range(20):
        b.failed()
        b.succeeded()
    assert b.state == "closed"
    b.failed()
    b.failed()
    clock.now = 31.0
    b.failed()
    assert b.state == "closed"
    clock.now = 61.0
    b.failed()
    b.failed()
    assert b.state == "open", "a failure of exactly so long ago counts"
    b, clock = open_breaker()
    # More failures than successes open the breaker, even if no two failures are consecutive.
    for _ in range(4):
        b.failed()
        b.failed()
        b.succeeded()
    assert b.state == "open"


def test_disabled_breaker_stays_closed() -> None:
    b = Breaker(Clock(), failures=0)
    for _ in range(1000):
        b.failed()
    assert b.admits()
