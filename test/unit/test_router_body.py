"""Bodies: what counts, how many tokens, and how they are rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang_router")

from sglang_router_laps.body import BadDeadline, parse, read_deadline, splice, with_deadline
from sglang_router_laps.prompt import CHAT, COMPLETIONS, GENERATE, batch_size, read_prompt
from sglang_router_laps.tokens import ByteCounter, TokenizerCounter, reported_tokens

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
objects = st.dictionaries(st.text(), json_values, max_size=6)
tails = st.dictionaries(
    st.sampled_from(["bootstrap_host", "bootstrap_port", "rid"]), st.integers(0, 9) | st.text(), min_size=1, max_size=3
)


@given(objects, tails, st.sampled_from([None, 2]), st.sampled_from(["", " ", "\n\t"]))
def test_splicing_equals_updating(body: dict[str, Any], extra: dict[str, Any], indent: int | None, pad: str) -> None:
    raw = (pad + json.dumps(body, indent=indent) + pad).encode()
    parsed = parse(raw)
    assert parsed == body
    assert json.loads(splice(raw, parsed, extra)) == {**body, **extra}


@given(st.binary(max_size=40))
def test_parsing_never_fails(raw: bytes) -> None:
    assert parse(raw) is None or isinstance(parse(raw), dict)


@given(
    st.sampled_from([GENERATE, COMPLETIONS, CHAT]),
    objects,
    st.sampled_from(["text", "input_ids", "prompt", "messages"]),
    json_values,
)
def test_reading_a_prompt_never_fails(endpoint: str, body: dict[str, Any], name: str, value: Any) -> None:  # fmt: skip
    body = {**body, name: value}
    prompt = read_prompt(endpoint, body)
    assert ByteCounter().count(prompt) >= 0
    batch_size(endpoint, body)


@pytest.mark.parametrize(
    ("endpoint", "body", "tokens"),
    [
        (GENERATE, {"text": "a" * 400}, 100),
        (GENERATE, {"text": ["a" * 400, "b" * 40]}, 110),
        (GENERATE, {"input_ids": [1, 2, 3]}, 3),
        (GENERATE, {"input_ids": [[1, 2, 3], [4]]}, 4),
        (COMPLETIONS, {"prompt": "a" * 400}, 100),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 3),
        (COMPLETIONS, {"prompt": ["a" * 40, "b" * 40]}, 20),
        (COMPLETIONS, {"prompt": [[1], [2, 3]]}, 3),
    ],
)
def test_each_form_of_a_prompt_counts(endpoint: str, body: dict[str, Any], tokens: int) -> None:
    assert ByteCounter().count(read_prompt(endpoint, body)) == tokens


def test_chat_counts_text_parts_and_tools_but_not_the_bytes_of_images() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 400}, image]}]}
    prompt = read_prompt(CHAT, body)
    assert prompt.media == 1
    assert 100 <= ByteCounter().count(prompt) <= 110
    with_tools = read_prompt(CHAT, {**body, "tools": [{"type": "function", "function": {"description": "b" * 4000}}]})
    assert ByteCounter().count(with_tools) > 1000


def test_a_conversation_begins_as_its_last_turn_did() -> None:
    first = [{"role": "user", "content": "hello"}]
    second = [*first, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    (a,), (b,) = (read_prompt(CHAT, {"messages": m}).texts for m in (first, second))
    assert b.startswith(a)


@pytest.mark.parametrize("per_token", [1.5, 3.0, 6.5])
def test_the_estimate_learns_the_ratio(per_token: float) -> None:
    counter = ByteCounter()
    prompt = read_prompt(GENERATE, {"text": "a" * 6000})
    for _ in range(200):
        counter.learn(prompt, round(6000 / per_token))
    assert counter.count(prompt) == pytest.approx(6000 / per_token, rel=0.05)


def test_text_and_chat_are_learnt_apart() -> None:
    counter = ByteCounter()
    chat = read_prompt(CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})
    for _ in range(100):
        counter.learn(chat, 300)
    assert counter.count(read_prompt(GENERATE, {"text": "a" * 600})) == 150
    assert counter.count(chat) == pytest.approx(300, rel=0.05)


def test_reported_tokens_are_found_in_a_reply_or_a_first_event() -> None:
    assert reported_tokens(b'{"meta_info":{"prompt_tokens": 12,"x":1}}') == 12
    assert reported_tokens(b'data: {"usage":{"prompt_tokens":7}}\n\n') == 7
    assert reported_tokens(b'{"usage":null}') is None


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One token per word."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_counts_exactly_and_extrapolates_beyond_its_bound(tokenizer: Path) -> None:
    counter = TokenizerCounter(str(tokenizer), exact_bytes=1000)
    assert counter.count(read_prompt(GENERATE, {"text": "a b c"})) == 3
    assert counter.count(read_prompt(GENERATE, {"text": "a " * 10_000})) == pytest.approx(10_000, rel=0.01)


def test_what_the_template_adds_is_learnt(tokenizer: Path) -> None:
    counter = TokenizerCounter(str(tokenizer / "tokenizer.json"), exact_bytes=1000)
    chat = read_prompt(CHAT, {"messages": [{"role": "user", "content": "a a a"}]})
    plain = counter._plain(chat)
    for _ in range(100):
        counter.learn(chat, plain + 12)
    assert counter.count(chat) == plain + 12


def test_a_deadline_of_the_body_stays() -> None:
    body = {"sampling_params": {"custom_params": {"ttft_slo_ms": 5, "x": 1}}}
    assert with_deadline(GENERATE, body, 9.0)["sampling_params"]["custom_params"] == {"ttft_slo_ms": 5, "x": 1}
    batch = {"sampling_params": [{"n": 1}, {}]}
    assert [p["custom_params"] for p in with_deadline(GENERATE, batch, 9.0)["sampling_params"]] == [
        {"ttft_slo_ms": 9.0}
    ] * 2
    assert with_deadline(COMPLETIONS, {}, 9.0) == {"custom_params": {"ttft_slo_ms": 9.0}}


@pytest.mark.parametrize(
    "text", ["", "soon", "0", "-1", "5e-324", "1e-310", "0.09", "1e10", "1" + 400 * "0", "nan", "inf", "1e999", "True"]
)
def test_a_hostile_deadline_is_refused(text: str) -> None:
    with pytest.raises(BadDeadline, match="x-sgl-ttft-slo-ms"):
        read_deadline(text)


def test_a_deadline_is_read() -> None:
    assert [read_deadline(t) for t in ("0.1", "400", "2.5e3", "1e9")] == [0.1, 400.0, 2500.0, 1e9]
