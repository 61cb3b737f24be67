"""Choice of the instance for a request: classes, prefixes, spilling, health; properties under random traffic."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang_router")

from choosing import choose_and_record
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
    choice = choose_and_record(p, Ask(tokens, [fingerprint(text)] if text else []))
    assert choice is not None
    return choice.instance, choice.length_class, choice.new_tokens, choice.why == "spill"


def test_threshold_is_inclusive() -> None:
    p = pools()
    assert route(p, 256)[0].pool == "short"
    assert route(p, 257)[0].pool == "long"


def test_least_loaded_server_of_pool_is_chosen() -> None:
    p = pools()
    with p.members("short")[0].lease(10, "short", 0.001):
        assert route(p, 20)[0] is p.members("short")[1]


def test_cached_prefix_makes_long_prompt_short_at_that_server() -> None:
    p = pools()
    history = b"".join(b"%05d" % i for i in range(4000))
    home, cls, new, _ = route(p, 5000, history)
    assert (home.pool, cls, new) == ("long", "long", 5000)
    again, cls, new, spilled = route(p, 5050, history + b"and one more question?")
    assert again is home
    assert cls == "short"
    assert new <= 256
    assert not spilled


def test_prefix_in_short_pool_keeps_conversation_there() -> None:
    p = pools()
    turn = b"".join(b"%05d" % i for i in range(200))
    home, *_ = route(p, 250, turn)
    assert home.pool == "short"
    again, cls, *_ = route(p, 350, turn + b"x" * 300)
    assert (again, cls) == (home, "short")


def test_overloaded_server_with_prefix_is_skipped() -> None:
    p = pools(6, initial_short=1)
    history = b"".join(b"%05d" % i for i in range(4000))
    home, *_ = route(p, 5000, history)
    with home.lease(50_000, "long", 5.0):
        assert route(p, 9000, history + b"y" * 20_000)[0] is not home


def test_short_request_spills_only_to_idle_long_instance() -> None:
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
def test_long_spill_follows_setting_and_laps_support(spill: str, parks: bool, pool: str) -> None:
    p = pools(spill=spill)
    for i in p.instances:
        i.outlook.parks = parks
    with contextlib.ExitStack() as stack:
        for i in p.members("long"):
            stack.enter_context(i.lease(9000))
        assert route(p, 5000)[0].pool == pool


def test_flooded_long_pool_spills_to_busy_short_server() -> None:
    p = pools(2, spill="both")
    short, long = p.instances
    with short.lease(2000), long.lease(15_000):
        assert route(p, 5000)[0] is long
    with short.lease(2001), long.lease(17_000):
        assert route(p, 5000)[0] is short
    with short.lease(2500), long.lease(17_000):
        assert route(p, 5000)[0] is long


def test_short_follow_up_stays_at_busy_server_with_prefix() -> None:
    p = pools(2, spill="both")
    history = b"".join(b"%05d" % i for i in range(4000))
    home, *_ = route(p, 5000, history)
    with home.lease(9000):
        again, cls, _, spilled = route(p, 5050, history + b"and one more question?")
        assert (again, cls, spilled) == (home, "short", False)


def test_pool_without_healthy_servers_uses_other_pool() -> None:
    p = pools()
    for i in p.members("short"):
        i.healthy = False
    chosen, cls, _, spilled = route(p, 10)
    assert (chosen.pool, cls, spilled) == ("long", "short", True)
    for i in p.instances:
        i.healthy = False
    assert choose_and_record(p, Ask(10)) is None


def test_moved_instance_keeps_old_requests_and_joins_new_pool() -> None:
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
def test_any_traffic_gets_healthy_servers_and_releases_leases(
    n: int, requests: list[tuple[int, bool, set[int]]]
) -> None:
    p = pools(n)
    with contextlib.ExitStack() as stack:
        for tokens, early, sick in requests:
            for k, i in enumerate(p.instances):
                i.healthy = k not in sick
            choice = choose_and_record(p, Ask(tokens))
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


def test_busy_time_runs_while_requests_are_in_flight() -> None:
    clock = Clock()
    i = PrefillInstance("http://h:1", None, "short", clock=clock)
    with i.lease(5), i.lease(5):
        clock.now = 2.0
        assert i.busy_seconds() == 2.0
    clock.now = 5.0
    assert i.busy_seconds() == 2.0


def test_deadline_overshoot_is_averaged_and_decays() -> None:
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
def test_bootstrap_host_drops_scheme_and_port(url: str, host: str) -> None:
    assert bootstrap_host(url.rstrip("/")) == host


SYSTEM = b"You are a helpful assistant. ".ljust(1500, b".")


def ask_after(system: bytes, question: object) -> tuple[int, bytes]:
    text = system + f"\n<user>{question}: what is that about?".encode()
    return len(text) // 4, text


def test_shared_system_prompt_is_copied_to_short_pool() -> None:
    p = pools()
    chosen = [route(p, *ask_after(SYSTEM, i)) for i in range(120)]
    assert [c[0].pool for c in chosen] == ["long"] * SHARERS + ["short"] * (120 - SHARERS)
    copies = [c for c in chosen if c[0].pool == "short" and c[2] > 256]
    assert [c[1] for c in copies] == ["long"]
    assert all(cls == "short" and new <= 256 for _, cls, new, _ in chosen[SHARERS + 1 :])


def test_single_conversation_is_not_copied_to_short_pool() -> None:
    p = pools()
    text = SYSTEM
    for i in range(60):
        text += f"\n<user>ok {i}\n<assistant>yes".encode()
        for _ in range(2):
            assert route(p, len(text) // 4, text)[0].pool == "long"


def test_identical_requests_do_not_count_as_sharers() -> None:
    p = pools()
    assert {route(p, *ask_after(SYSTEM, "same"))[0].pool for _ in range(20)} == {"long"}


def test_lost_copies_are_remade_at_doubling_intervals() -> None:
    p = pools()
    made, asked = [], 0
    for asked in range(300):
        choice = choose_and_record(p, Ask(ask_after(SYSTEM, asked)[0], [fingerprint(ask_after(SYSTEM, asked)[1])]))
        assert choice is not None
        if choice.why == "copy":
            made.append(asked)
            choice.instance.prefixes.clear()
    gaps = [b - a for a, b in itertools.pairwise(made)]
    assert len(made) >= 4
    assert gaps == [2 * SHARERS << k for k in range(len(gaps))]


def test_busy_short_pool_gets_no_prefix_copy() -> None:
    p = pools()
    with contextlib.ExitStack() as stack:
        for i in p.members("short"):
            stack.enter_context(i.lease(5000))
        assert {route(p, *ask_after(SYSTEM, i))[0].pool for i in range(20)} == {"long"}
    assert route(p, *ask_after(SYSTEM, "now"))[0].pool == "short"


def test_retries_of_request_do_not_count_as_sharers() -> None:
    p = pools()
    route(p, *ask_after(SYSTEM, "first"))
    tokens, text = ask_after(SYSTEM, "second")
    ask = Ask(tokens, [fingerprint(text)])
    for _ in range(20):
        choice = choose_and_record(p, ask)
        assert choice is not None
        assert choice.instance.pool == "long"


def test_number_of_watched_prefixes_is_bounded() -> None:
    shared = SharedPrefixes()
    for i in range(3 * WATCHED):
        shared.note(fingerprint(b"%06d" % i * 100), 1)
        assert len(shared) == min(i + 1, WATCHED)


def test_long_prefix_outweighs_short_wait() -> None:
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


def test_image_counts_unless_inside_cached_prefix() -> None:
    p = pools()
    text = "".join(f"{i:05d}" for i in range(400))
    first = choose_and_record(p, chat_ask(text))
    assert first is not None
    behind = choose_and_record(p, chat_ask(text, [image("a"), {"type": "text", "text": "b" * 600}]))
    assert behind is not None
    assert (behind.instance, behind.length_class) == (first.instance, "long")
    assert behind.new_tokens >= 512
    inside = choose_and_record(p, chat_ask(text, [image("a"), {"type": "text", "text": "b" * 600}], "and?"))
    assert inside is not None
    assert (inside.instance, inside.length_class) == (first.instance, "short")
    other = choose_and_record(p, chat_ask(text, [image("x"), {"type": "text", "text": "b" * 600}], "and?"))
    assert other is not None
    assert other.new_tokens >= 512


def test_media_without_text_position_always_count() -> None:
    p = pools()
    body = {"text": "".join(f"{i:05d}" for i in range(400)), "image_data": [["a", "b"], ["c"]]}
    for _ in range(2):
        choice = choose_and_record(p, measure(read_prompt(GENERATE, body), ByteCounter(), 0))
        assert choice is not None
        assert choice.new_tokens >= 3 * 512
