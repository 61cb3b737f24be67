"""Choice of the instance for a request: classes, prefixes, spilling, health; properties under random traffic."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang_router")

from choosing import send
from laps_core.pools.choice import Pools
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import Move
from laps_core.pools.prefill import PrefillInstance
from laps_core.pools.prefixes import (
    SHARERS,
    WATCHED,
    Ask,
    SharedPrefixes,
    fingerprint,
)
from sglang_router_laps.prompts.measure import measure
from sglang_router_laps.prompts.reading import CHAT, GENERATE, read_prompt
from sglang_router_laps.prompts.tokens import ByteCounter
from sglang_router_laps.servers.upstream import bootstrap_host


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pools(n: int = 4, **config: object) -> Pools:
    divided = {"initial_short": n // 2, **config}
    return Pools([(f"http://h{i}:1", 8998) for i in range(n)], AllocConfig.parse({}, json.dumps(divided)), Clock())


def route(p: Pools, tokens: int, text: bytes = b"") -> tuple[PrefillInstance, str, int, bool]:
    choice = send(p, Ask(tokens, [fingerprint(text)] if text else []))
    assert choice is not None
    return choice.instance, choice.length_class, choice.new_tokens, choice.spilled


def test_the_threshold_is_inclusive() -> None:
    p = pools()
    assert route(p, 256)[0].pool == "short"
    assert route(p, 257)[0].pool == "long"


def test_the_least_loaded_of_the_pool_is_chosen() -> None:
    p = pools()
    with p.members("short")[0].lease(10, "short", 0.001):
        assert route(p, 20)[0] is p.members("short")[1]


def test_a_known_prefix_makes_a_long_prompt_short_where_it_lies() -> None:
    p = pools()
    history = b"".join(b"%05d" % i for i in range(4000))
    home, cls, new, _ = route(p, 5000, history)
    assert (home.pool, cls, new) == ("long", "long", 5000)
    again, cls, new, spilled = route(p, 5050, history + b"and one more question?")
    assert again is home
    assert cls == "short"
    assert new <= 256
    assert not spilled


def test_a_prefix_in_the_short_pool_keeps_a_conversation_there() -> None:
    p = pools()
    turn = b"".join(b"%05d" % i for i in range(200))
    home, *_ = route(p, 250, turn)
    assert home.pool == "short"
    again, cls, *_ = route(p, 350, turn + b"x" * 300)
    assert (again, cls) == (home, "short")


def test_an_overloaded_holder_is_passed_over() -> None:
    p = pools(6, initial_short=1)
    history = b"".join(b"%05d" % i for i in range(4000))
    home, *_ = route(p, 5000, history)
    with home.lease(50_000, "long", 5.0):
        assert route(p, 9000, history + b"y" * 20_000)[0] is not home


def test_a_short_request_spills_to_an_idle_long_instance_only() -> None:
    p = pools()
    with contextlib.ExitStack() as stack:
        for i in p.members("short"):
            stack.enter_context(i.lease(3000))
        chosen, cls, _, spilled = route(p, 10)
        assert (chosen.pool, cls, spilled) == ("long", "short", True)
        for i in p.members("long"):
            stack.enter_context(i.lease(1))
        assert route(p, 10)[0].pool == "short"


@pytest.mark.parametrize(
    ("spill", "parks", "pool"),
    [
        ("short", True, "long"),
        ("off", True, "long"),
        ("both", False, "short"),
        ("auto", False, "long"),
        ("auto", True, "short"),
    ],
)
def test_long_requests_spill_where_they_may(spill: str, parks: bool, pool: str) -> None:
    p = pools(spill=spill)
    for i in p.instances:
        i.outlook.parks = parks
    with contextlib.ExitStack() as stack:
        for i in p.members("long"):
            stack.enter_context(i.lease(9000))
        assert route(p, 5000)[0].pool == pool


def test_a_flooded_long_pool_spills_to_the_busy_too() -> None:
    p = pools(2, spill="both")
    short, long = p.instances
    with short.lease(2000), long.lease(15_000):
        assert route(p, 5000)[0] is long
    with short.lease(2001), long.lease(17_000):
        assert route(p, 5000)[0] is short
    with short.lease(2500), long.lease(17_000):
        assert route(p, 5000)[0] is long


def test_what_is_short_where_its_history_lies_stays_there() -> None:
    p = pools(2, spill="both")
    history = b"".join(b"%05d" % i for i in range(4000))
    home, *_ = route(p, 5000, history)
    with home.lease(9000):
        again, cls, _, spilled = route(p, 5050, history + b"and one more question?")
        assert (again, cls, spilled) == (home, "short", False)


def test_a_pool_without_anybody_healthy_is_served_by_the_other() -> None:
    p = pools()
    for i in p.members("short"):
        i.healthy = False
    chosen, cls, _, spilled = route(p, 10)
    assert (chosen.pool, cls, spilled) == ("long", "short", True)
    for i in p.instances:
        i.healthy = False
    assert send(p, Ask(10)) is None


def test_a_moved_instance_takes_new_requests_of_its_new_pool_and_keeps_the_old() -> None:
    p = pools(2 + 1, initial_short=2)
    moving = p.members("short")[0]
    with moving.lease(100):
        p.apply(Move(moving.url, "short", "long", 0.0, "test"))
        assert moving.outstanding == 1
        assert route(p, 10)[0].pool == "short"
        assert {route(p, 9999)[0] for _ in range(3)} <= set(p.members("long"))


@settings(deadline=None)
@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(1, 4000), st.booleans(), st.sets(st.integers(0, 5), max_size=5)), max_size=60),
)
def test_any_traffic_is_placed_and_given_back(n: int, requests: list[tuple[int, bool, set[int]]]) -> None:
    p = pools(n)
    with contextlib.ExitStack() as stack:
        for tokens, early, sick in requests:
            for k, i in enumerate(p.instances):
                i.healthy = k not in sick
            choice = send(p, Ask(tokens))
            if choice is None:
                assert not any(i.healthy for i in p.instances)
                continue
            assert choice.instance.healthy
            assert choice.length_class == ("short" if tokens <= 256 else "long")
            lease = stack.enter_context(choice.instance.lease(choice.new_tokens))
            if early:
                lease.end()
        assert sum(i.outstanding_tokens for i in p.instances) >= 0
    assert all(i.outstanding == i.outstanding_tokens == 0 for i in p.instances)


def test_busy_time_runs_while_anything_is_in_flight() -> None:
    clock = Clock()
    i = PrefillInstance("http://h:1", None, "short", clock=clock)
    with i.lease(5), i.lease(5):
        clock.now = 2.0
        assert i.busy_seconds() == 2.0
    clock.now = 5.0
    assert i.busy_seconds() == 2.0


def test_deadline_overshoot_is_averaged_and_forgotten() -> None:
    clock = Clock()
    i = PrefillInstance("http://h:1", None, "short", clock=clock)
    i.note_ttft(0.1, 0.4)
    assert i.deviation == 0.0
    for _ in range(50):
        i.note_ttft(0.8, 0.4)
    assert i.deviation == pytest.approx(1.0, rel=0.01)
    clock.now = 60.0
    assert i.deviation < 0.001


@pytest.mark.parametrize(("url", "host"), [("http://[::1]:30000", "[::1]"), ("http://h:1/", "h")])
def test_the_bootstrap_host_is_as_the_servers_want_it(url: str, host: str) -> None:
    assert bootstrap_host(url.rstrip("/")) == host


SYSTEM = b"You are a helpful assistant. ".ljust(1500, b".")


def ask_after(system: bytes, question: object) -> tuple[int, bytes]:
    text = system + f"\n<user>{question}: what is that about?".encode()
    return len(text) // 4, text


def test_a_shared_system_prompt_gets_a_copy_in_the_short_pool() -> None:
    p = pools()
    chosen = [route(p, *ask_after(SYSTEM, i)) for i in range(120)]
    assert [c[0].pool for c in chosen] == ["long"] * SHARERS + ["short"] * (120 - SHARERS)
    copies = [c for c in chosen if c[0].pool == "short" and c[2] > 256]
    assert [c[1] for c in copies] == ["long"]
    assert all(cls == "short" and new <= 256 for _, cls, new, _ in chosen[SHARERS + 1 :])


def test_one_conversation_is_not_copied_however_small_its_turns() -> None:
    p = pools()
    text = SYSTEM
    for i in range(60):
        text += f"\n<user>ok {i}\n<assistant>yes".encode()
        for _ in range(2):
            assert route(p, len(text) // 4, text)[0].pool == "long"


def test_the_same_request_again_is_not_another() -> None:
    p = pools()
    assert {route(p, *ask_after(SYSTEM, "same"))[0].pool for _ in range(20)} == {"long"}


def test_a_lost_copy_is_made_again_after_ever_more_requests() -> None:
    p = pools()
    made, asked = [], 0
    for asked in range(300):
        choice = send(p, Ask(ask_after(SYSTEM, asked)[0], [fingerprint(ask_after(SYSTEM, asked)[1])]))
        assert choice is not None
        if choice.copies:
            made.append(asked)
            choice.instance.prefixes.clear()
    gaps = [b - a for a, b in itertools.pairwise(made)]
    assert len(made) >= 4
    assert gaps == [2 * SHARERS << k for k in range(len(gaps))]


def test_no_copy_is_made_where_the_short_pool_has_no_time_for_it() -> None:
    p = pools()
    with contextlib.ExitStack() as stack:
        for i in p.members("short"):
            stack.enter_context(i.lease(5000))
        assert {route(p, *ask_after(SYSTEM, i))[0].pool for i in range(20)} == {"long"}
    assert route(p, *ask_after(SYSTEM, "now"))[0].pool == "short"


def test_another_try_of_a_request_is_not_another_request() -> None:
    p = pools()
    route(p, *ask_after(SYSTEM, "first"))
    tokens, text = ask_after(SYSTEM, "second")
    ask = Ask(tokens, [fingerprint(text)])
    for _ in range(20):
        choice = send(p, ask)
        assert choice is not None
        assert choice.instance.pool == "long"


def test_the_prefixes_watched_are_bounded_and_so_is_what_is_kept_of_each() -> None:
    shared = SharedPrefixes()
    for i in range(3 * WATCHED):
        shared.note(fingerprint(b"%06d" % i * 100), 1)
        assert len(shared) == min(i + 1, WATCHED)


def test_a_long_prefix_is_not_computed_again_to_be_rid_of_a_short_wait() -> None:
    p = pools(2 + 4, initial_short=2)
    document = b"".join(b"%07d" % i for i in range(20_000))
    home, *_ = route(p, 35_000, document)
    with home.lease(3000, "long", 0.3):
        assert route(p, 35_050, document + b"and one more question?")[0] is home


def chat_ask(*contents: object) -> Ask:
    prompt = read_prompt(CHAT, {"messages": [{"role": "user", "content": c} for c in contents]})
    return measure(prompt, ByteCounter(), 0)


def image(name: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"data:{name}"}}


def test_an_image_behind_a_known_prefix_counts_and_one_inside_it_does_not() -> None:
    p = pools()
    text = "".join(f"{i:05d}" for i in range(400))
    first = send(p, chat_ask(text))
    assert first is not None
    behind = send(p, chat_ask(text, [image("a"), {"type": "text", "text": "b" * 600}]))
    assert behind is not None
    assert (behind.instance, behind.length_class) == (first.instance, "long")
    assert behind.new_tokens >= 512
    inside = send(p, chat_ask(text, [image("a"), {"type": "text", "text": "b" * 600}], "and?"))
    assert inside is not None
    assert (inside.instance, inside.length_class) == (first.instance, "short")
    other = send(p, chat_ask(text, [image("x"), {"type": "text", "text": "b" * 600}], "and?"))
    assert other is not None
    assert other.new_tokens >= 512


def test_media_without_a_place_in_the_text_always_count() -> None:
    p = pools()
    body = {"text": "".join(f"{i:05d}" for i in range(400)), "image_data": [["a", "b"], ["c"]]}
    for _ in range(2):
        choice = send(p, measure(read_prompt(GENERATE, body), ByteCounter(), 0))
        assert choice is not None
        assert choice.new_tokens >= 3 * 512
