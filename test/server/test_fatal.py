"""Requests that would end a server and are refused, where no server of the tests is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize(("sampling", "served"), [({}, True), ({"beam_width": 1}, True), ({"beam_width": 2}, False)])
def test_logit_processors_of_beam_searches_are_refused(sampling: dict[str, Any], served: bool) -> None:
    """SGLang's beams have no parameters for their processor, which then fails."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
    from sglang_laps.checks import fatal

    request = SimpleNamespace(
        custom_logit_processor=DisallowedTokensLogitsProcessor.to_str(),
        sampling_params={**sampling, "custom_params": {"token_ids": [5]}},
    )
    if served:
        fatal.require_processor(request)
        return
    with pytest.raises(ValueError, match="beam"):
        fatal.require_processor(request)


@pytest.mark.parametrize(("labels", "served"), [(None, True), ({"a": "x"}, True), ({"a": "x", "b": "y"}, False)])
def test_labels_that_the_metrics_lack_are_refused(labels: dict[str, str] | None, served: bool) -> None:
    from sglang_laps.checks import fatal

    request = SimpleNamespace(custom_labels=labels)
    if served:
        fatal.require_known_labels(request, ["a", "c"])
        return
    with pytest.raises(ValueError, match="'b' is not one of"):
        fatal.require_known_labels(request, ["a", "c"])


@pytest.mark.parametrize("drafts", [None, "EAGLE"])
@pytest.mark.parametrize("backend", [None, "outlines", "xgrammar"])
@pytest.mark.parametrize("params", [{"regex": "a+"}, {"json_schema": "{}"}, {"regex": None}])
def test_grammars_that_cannot_take_back_drafts_are_refused(params: Any, backend: str | None, drafts: Any) -> None:
    from sglang_laps.checks import fatal

    request = SimpleNamespace(sampling_params=params)
    args = SimpleNamespace(grammar_backend=backend, speculative_algorithm=drafts)
    if backend != "outlines" or not drafts or not any(params.values()):
        fatal.require_rollback(request, args)
        return
    with pytest.raises(ValueError, match="not with --grammar-backend outlines"):
        fatal.require_rollback(request, args)


@pytest.mark.parametrize(
    ("sampling", "wrong"),
    [
        ({"max_new_tokens": 5.5}, "max_new_tokens"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"regex": ["a+"]}, "regex"),
        ({"stream_interval": "x"}, "stream_interval"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop": [["a"]]}, "stop"),
        ({"skip_special_tokens": "x"}, "skip_special_tokens"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
    ],
)
def test_sampling_parameters_of_other_types_are_refused(sampling: dict[str, Any], wrong: str) -> None:
    """SGLang looks at them on /generate alone, not on /vertex_generate or in sgl.Engine, and they end its scheduler."""
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang_laps.checks import fatal

    with pytest.raises(ValueError, match=wrong):
        fatal.verify(SamplingParams(**sampling), 2048)


def test_sampling_parameters_get_their_types() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang_laps.checks import fatal

    params = SamplingParams(
        max_new_tokens=5.0, temperature=1, logit_bias={5: float("-inf"), "6": 2}, custom_params={"a": {"b": [{}]}}
    )
    fatal.verify(params, 2048)
    assert repr(params.max_new_tokens) == "5"
    assert params.custom_params == {"a": {"b": [{}]}}


@pytest.mark.parametrize(("session", "served"), [({"id": "a"}, True), ({"rid": "a"}, False), (None, False)])
def test_turns_without_tokens_are_served(session: dict[str, str] | None, served: bool) -> None:
    """The history of a session can be the whole prompt."""
    from sglang_laps.checks import prompts

    model = SimpleNamespace(is_multimodal=False, is_generation=True, vocab_size=2048)
    args = SimpleNamespace(tokenizer_metrics_allowed_custom_labels=None, enable_custom_logit_processor=False)
    manager = SimpleNamespace(model_config=model, server_args=args, disaggregation_mode=SimpleNamespace(value="null"))
    request = SimpleNamespace(session_params=session, input_ids=[])
    if served:
        prompts.validate(lambda *_: None, manager, request, [])
        return
    with pytest.raises(ValueError, match="the prompt is empty"):
        prompts.validate(lambda *_: None, manager, request, [])


@pytest.mark.parametrize("positions", [[3], [-1], [0, 9], ["a"], [[1]]])
def test_positions_outside_of_the_prompt_are_refused(positions: list[Any]) -> None:
    from sglang_laps.checks import fatal

    whole = SimpleNamespace(disable_radix_cache=True, chunked_prefill_size=-1)
    fatal.require_positions(SimpleNamespace(token_indices_to_pool=[0, 2]), [5, 6, 7], whole)
    with pytest.raises(ValueError, match="no position in the prompt"):
        fatal.require_positions(SimpleNamespace(token_indices_to_pool=positions), [5, 6, 7], whole)
