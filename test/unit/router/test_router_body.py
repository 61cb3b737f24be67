"""Request bodies: prompts, token counts, and rewriting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang_router")

from sglang_router_laps.prompts.measure import measure
from sglang_router_laps.prompts.reading import CHAT, COMPLETIONS, GENERATE, batch_size, read_prompt
from sglang_router_laps.prompts.tokens import START_MESSAGE_TOKENS, ByteCounter, TokenizerCounter, reported_tokens
from sglang_router_laps.request.body import add_deadline, parse, read_deadline, refuse, splice, without_routed
from sglang_router_laps.request.replies import BadRequest, Rejection

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
def test_splice_equals_dict_update(body: dict[str, Any], extra: dict[str, Any], indent: int | None, pad: str) -> None:
    raw = (pad + json.dumps(body, indent=indent) + pad).encode()
    assert parse(raw) == (raw, body)
    assert json.loads(splice(raw, body, json.dumps(extra).encode())) == {**body, **extra}


@given(st.binary(max_size=40))
def test_parse_returns_object_or_error_reply(raw: bytes) -> None:
    parsed = refused = None
    try:
        parsed = parse(raw)
    except Rejection as e:
        refused = e.reply
    if parsed:
        assert isinstance(json.loads(parsed[0]), dict)
        assert isinstance(parsed[1], dict)
    else:
        assert refused
        assert refused.status in (400, 422)
        assert json.loads(refused.body)["error"]["code"] == refused.status


@given(
    st.sampled_from([GENERATE, COMPLETIONS, CHAT]),
    objects,
    st.sampled_from(["text", "input_ids", "prompt", "messages"]),
    json_values,
)
def test_reading_prompt_never_fails(endpoint: str, body: dict[str, Any], name: str, value: Any) -> None:  # fmt: skip
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
def test_every_prompt_form_is_counted(endpoint: str, body: dict[str, Any], tokens: int) -> None:
    assert ByteCounter().count(read_prompt(endpoint, body)) == tokens


def test_chat_counts_text_and_tools_but_not_image_bytes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 400}, image]}]}
    prompt = read_prompt(CHAT, body)
    assert prompt.media == 1
    assert 100 <= ByteCounter().count(prompt) <= 110
    with_tools = read_prompt(CHAT, {**body, "tools": [{"type": "function", "function": {"description": "b" * 4000}}]})
    assert ByteCounter().count(with_tools) > 1000


def test_next_turn_starts_with_text_of_previous_turn() -> None:
    first = [{"role": "user", "content": "hello"}]
    second = [*first, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    (a,), (b,) = (read_prompt(CHAT, {"messages": m}).texts for m in (first, second))
    assert b.startswith(a)


@pytest.mark.parametrize("per_token", [1.5, 3.0, 6.5])
def test_byte_counter_learns_bytes_per_token(per_token: float) -> None:
    counter = ByteCounter()
    prompt = read_prompt(GENERATE, {"text": "a" * 6000})
    counter.count(prompt)
    for _ in range(200):
        counter.learn(prompt, round(6000 / per_token))
    assert counter.count(prompt) == pytest.approx(6000 / per_token, rel=0.05)


def test_text_and_chat_ratios_are_learned_separately() -> None:
    counter = ByteCounter()
    chat = read_prompt(CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})
    counter.count(chat)
    for _ in range(100):
        counter.learn(chat, 300)
    assert counter.count(read_prompt(GENERATE, {"text": "a" * 600})) == 150
    assert counter.count(chat) == pytest.approx(300, rel=0.05)


def test_reported_tokens_are_found_in_reply_or_first_event() -> None:
    assert reported_tokens(b'{"meta_info":{"prompt_tokens": 12,"x":1}}') == 12
    assert reported_tokens(b'data: {"usage":{"prompt_tokens":7}}\n\n') == 7
    assert reported_tokens(b'{"usage":null}') is None


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Write a tokenizer with one token per word and return its path."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer_counts_exactly_and_extrapolates_long_text(tokenizer: Path) -> None:
    counter = TokenizerCounter(str(tokenizer), exact_chars=1000)
    assert counter.count(read_prompt(GENERATE, {"text": "a b c"})) == 3
    assert counter.count(read_prompt(GENERATE, {"text": "a " * 10_000})) == pytest.approx(10_000, rel=0.01)


class Watched:
    """Tokenizer that records the texts that it gets."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.given: list[str] = []

    def encode(self, text: str) -> Any:
        self.given.append(text)
        return self.inner.encode(text)


@pytest.fixture
def watched(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TokenizerCounter, Watched]:
    import tokenizers

    made: list[Watched] = []
    load = tokenizers.Tokenizer.from_file

    class Loader:
        @staticmethod
        def from_file(path: str) -> Watched:
            made.append(Watched(load(path)))
            return made[-1]

    monkeypatch.setattr(tokenizers, "Tokenizer", Loader)
    counter = TokenizerCounter(str(tokenizer), exact_chars=16384)
    return counter, made[0]


@pytest.mark.parametrize("texts", [["a " * 2048] * 512, ["a "] * 50_000, [""] * 50_000 + ["a a"]])
def test_batch_is_tokenized_once_within_budget_of_one_request(
    watched: tuple[TokenizerCounter, Watched], texts: list[str]
) -> None:
    counter, tokenizer = watched
    prompt = read_prompt(COMPLETIONS, {"prompt": texts})
    tokens = sum(len(t) // 2 for t in texts)
    assert counter.count(prompt) == pytest.approx(tokens, rel=0.01, abs=2)
    assert sum(map(len, tokenizer.given)) <= 16384
    assert len(tokenizer.given) <= 16384 / 64
    given = len(tokenizer.given)
    counter.learn(prompt, tokens)
    assert len(tokenizer.given) == given


def test_learning_from_reply_tokenizes_nothing(watched: tuple[TokenizerCounter, Watched]) -> None:
    counter, tokenizer = watched
    chat = read_prompt(CHAT, {"messages": [{"role": "user", "content": "a a a"}]})
    before = counter.count(chat)
    for _ in range(100):
        counter.learn(chat, before + 20)
    assert len(tokenizer.given) == 1
    assert counter.count(chat) == before + 20


def test_lone_surrogate_counts_as_one_token(tokenizer: Path) -> None:
    counter = TokenizerCounter(str(tokenizer), exact_chars=1000)
    assert counter.count(read_prompt(GENERATE, {"text": "a \ud800 a"})) == 3


@pytest.mark.parametrize("messages", [1, 3])
def test_tokens_of_chat_template_are_learned(tokenizer: Path, messages: int) -> None:
    counter = TokenizerCounter(str(tokenizer / "tokenizer.json"), exact_chars=1000)
    chat = read_prompt(CHAT, {"messages": [{"role": "user", "content": "a a a"}] * messages})
    plain = counter.count(chat) - round(messages * START_MESSAGE_TOKENS)
    for _ in range(100):
        counter.learn(chat, plain + messages * 12)
    assert counter.count(chat) == plain + messages * 12


def deadline(endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    raw, added = add_deadline(endpoint, json.dumps(body).encode(), body, 9.0)
    assert json.loads(raw) == added
    return added


def test_add_deadline_keeps_deadline_of_body() -> None:
    body = {"sampling_params": {"custom_params": {"ttft_slo_ms": 5, "x": 1}}}
    assert deadline(GENERATE, body)["sampling_params"]["custom_params"] == {"ttft_slo_ms": 5, "x": 1}
    batch = {"sampling_params": [{"n": 1}, {}]}
    assert [p["custom_params"] for p in deadline(GENERATE, batch)["sampling_params"]] == [{"ttft_slo_ms": 9.0}] * 2
    assert deadline(COMPLETIONS, {}) == {"custom_params": {"ttft_slo_ms": 9.0}}


@pytest.mark.parametrize(
    "text",
    ["5e-324", "1e-310", "1e-9", "0.09", "1e10", "1" + "0" * 400, "-1", "nan", "inf", "x", "1_000", "\u0661\u0660"],
)
def test_invalid_or_out_of_range_deadline_is_rejected(text: str) -> None:
    with pytest.raises(BadRequest, match="x-sgl-ttft-slo-ms"):
        read_deadline([text])


def test_repeated_deadline_is_rejected() -> None:
    assert read_deadline(["0.1"]) == 0.1
    with pytest.raises(BadRequest, match="given 2 times"):
        read_deadline(["250", "250"])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("endpoint", "body", "unread"),
    [
        (GENERATE, {"text": "a"}, False),
        (GENERATE, {"input_ids": [1, 2]}, False),
        (GENERATE, {"input_ids": [1, [2], 3]}, True),
        (GENERATE, {"input_ids": [[1], 2]}, True),
        (GENERATE, {"input_ids": nested(2000)}, True),
        (GENERATE, {"input_embeds": [[0.5]]}, True),
        (GENERATE, {"text": 5}, True),
        (COMPLETIONS, {"prompt": [["a"]]}, True),
        (COMPLETIONS, {}, True),
        (CHAT, {"messages": "a"}, True),
        (CHAT, {"messages": [5]}, True),
        (CHAT, {"messages": [{"role": nested(2000), "content": "a"}]}, False),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, True),
        (CHAT, {"messages": [{"role": "user", "content": [5]}]}, True),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": nested(2000)}, True),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"x": "\ud800"}]}]}, False),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [float("nan"), 10**30]}, False),
    ],
)
def test_unreadable_prompt_is_marked_and_measured_by_body_size(
    endpoint: str, body: dict[str, Any], unread: bool
) -> None:
    prompt = read_prompt(endpoint, body)
    assert prompt.unread == unread
    ask = measure(prompt, ByteCounter(), 4_000_000)
    assert (ask.total == 1_000_000) == unread


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"n": 2}),
        (COMPLETIONS, {"n": 2.0}),
        (COMPLETIONS, {"n": "3"}),
        (CHAT, {"n": 10**400}),
        (GENERATE, {"sampling_params": {"n": 2}}),
        (GENERATE, {"text": ["a", "b"], "sampling_params": {"n": 2}}),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}),
    ],
)
def test_more_than_one_sample_is_refused(endpoint: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="n: only one sample"):
        refuse(endpoint, body)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {}),
        (CHAT, {"n": 1}),
        (CHAT, {"n": None}),
        (CHAT, {"n": True}),
        (CHAT, {"n": "many"}),
        (CHAT, {"n": [2]}),
        (COMPLETIONS, {"best_of": 2}),
        (GENERATE, {"n": 2}),
        (GENERATE, {"sampling_params": None}),
        (GENERATE, {"sampling_params": [{"n": 1}, None, 5]}),
        (GENERATE, {"sampling_params": {"n": 2, "beam_width": 4}}),
    ],
)
def test_refuse_accepts_bodies_without_extra_samples(endpoint: str, body: dict[str, Any]) -> None:
    refuse(endpoint, body)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (GENERATE, {"text": "a", "return_hidden_states": [False]}),
        (GENERATE, {"input_ids": [5, 6], "top_logprobs_num": [2]}),
        (CHAT, {"lora_path": ["a"]}),
        (GENERATE, {"text": "a", "lora_id": "a"}),
        (GENERATE, {"text": ["a", "b"], "lora_id": ["a", "a"]}),
        (GENERATE, {"text": "a", "custom_labels": {"a": "b"}}),
        (GENERATE, {"text": "a", "session_params": {"id": ["a"]}}),
        (GENERATE, {"text": "a", "session_params": {"id": "a", "rid": "b", "offset": 1.5}}),
    ],
)
def test_fields_that_end_servers_are_refused(endpoint: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"one prompt|lora_path names|custom_labels|session_params"):
        refuse(endpoint, body)


@pytest.mark.parametrize(
    "body",
    [
        {"text": ["a", "b"], "return_hidden_states": [False, True], "lora_path": ["a", None]},
        {"input_ids": [[5, 6]], "top_logprobs_num": [2]},
        {"text": "a", "return_hidden_states": False, "lora_path": "a", "bootstrap_room": [7]},
        {"text": "a", "custom_labels": {}},
        {"text": "a", "session_params": {"id": "a", "rid": None, "offset": 5, "replace": True}},
        {"text": "a", "session_params": "a"},
    ],
)
def test_values_for_each_prompt_of_a_batch_are_served(body: dict[str, Any]) -> None:
    refuse(GENERATE, body)


@pytest.mark.parametrize("raw", [b'{"x":' + b"[" * 1500 + b"]" * 1500 + b"}", b'{"a":' * 1200 + b"1" + b"}" * 1200])
def test_too_deeply_nested_body_is_rejected(raw: bytes) -> None:
    with pytest.raises(Rejection) as e:
        parse(raw)
    assert e.value.reply.status == 400


def test_many_brackets_do_not_count_as_deep_nesting() -> None:
    body = {"input_ids": [[i] for i in range(3000)], "x": "[{" * 2000}
    assert parse(json.dumps(body).encode())[1] == body


@pytest.mark.parametrize("value", ["[]", "{}", '"\\\\",[]', '{"\\"":"\\\\\\""}'])
def test_router_refuses_bodies_of_too_many_lists(value: str) -> None:
    """Each takes sixty bytes in memory, and other requests wait while it is made."""
    raw = '{"text":"a","x":[%s]}'
    assert parse((raw % ",".join([value] * 199_998)).encode())
    with pytest.raises(Rejection) as e:
        parse((raw % ",".join([value] * 199_999)).encode())
    assert e.value.reply.status == 413


@pytest.mark.parametrize("text", ["[" * 300_000, '"[\\' * 300_000, "\\[{" * 200_000])
def test_brackets_of_texts_do_not_count(text: str) -> None:
    body = {"text": text, "x": text}
    assert parse(json.dumps(body).encode())[1] == body


@pytest.mark.parametrize("room", ["NaN", "1e999", "1" + "0" * 400])
def test_client_bootstrap_rooms_are_removed(room: str) -> None:
    raw = b'{"text":"a","big":123456789012345678901234567890,"bootstrap_room":%b}' % room.encode()
    assert json.loads(without_routed(raw, parse(raw)[1])) == {"text": "a", "big": 123456789012345678901234567890}
    assert without_routed(b'{"text": "a"}', {"text": "a"}) == b'{"text": "a"}'


@pytest.mark.parametrize("body", [{"text": ""}, {"text": ["a", ""]}, {"text": "", "image_data": "x"}])
def test_generate_rejects_empty_text(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="empty"):
        refuse(GENERATE, body)
    refuse(GENERATE, {**body, "input_ids": [5]})
    refuse(COMPLETIONS, body)
