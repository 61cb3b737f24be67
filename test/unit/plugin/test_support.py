"""Server arguments under which LAPS does or does not run."""

from __future__ import annotations

from argparse import Namespace

import pytest
from sglang_laps import compat
from sglang_laps.support import no_prefill_server, off_reason


def args(mode: str | None, **more: object) -> Namespace:
    return Namespace(disaggregation_mode=mode, pp_size=more.pop("pp_size", 1), **more)


@pytest.mark.parametrize("mode", ["prefill", "null", None])
def test_laps_supports_prefill_and_colocated_servers(mode: str | None) -> None:
    assert off_reason(args(mode)) is None
    assert (no_prefill_server(args(mode)) is None) == (mode == "prefill")


def test_laps_is_off_on_decode_servers() -> None:
    assert off_reason(args("decode")) == "--disaggregation-mode is decode, not prefill"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"speculative_algorithm": "NGRAM"}, "speculative decoding with NGRAM"),
        ({"speculative_algorithm": "FROZEN_KV_MTP"}, "speculative decoding with FROZEN_KV_MTP"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_use_rejection_sampling": True},
            "--speculative-use-rejection-sampling",
        ),
        (
            {"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True, "enable_dp_attention": True},
            "--enable-multi-layer-eagle with data-parallel attention",
        ),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"dllm_algorithm": "x"}, "--dllm-algorithm"),
        ({"enable_prefill_delayer": True}, "--enable-prefill-delayer"),
        ({"attn_dp_size": 2, "prefill_decode_interval": 1}, "--prefill-decode-interval"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"enable_pd_role_switch": True}, "--enable-pd-role-switch"),
    ],
)
def test_unsupported_colocated_argument_is_named(more: dict[str, object], says: str) -> None:
    reason = off_reason(args("null", **more))
    assert reason is not None
    assert says in reason
    assert reason.endswith(": not supported without disaggregation")
    assert "\n" not in reason
    assert off_reason(args("prefill", **more)) is None


def test_colocated_speculative_decoding_is_off_on_older_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "release", lambda: compat.RELEASES["0.5.22"])
    assert "speculative decoding on SGLang" in str(off_reason(args("null", speculative_algorithm="EAGLE")))
    assert off_reason(args("null")) is None


@pytest.mark.parametrize(
    "more",
    [
        {"speculative_algorithm": "EAGLE"},
        {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 4},
        {"moe_a2a_backend": "deepep", "enable_eplb": True, "enable_two_batch_overlap": True},
        {"enable_dp_attention": True, "speculative_algorithm": "NEXTN"},
        {"prefill_decode_interval": 1},
        {"enable_priority_scheduling": True},
        {"enable_lora": True, "lora_paths": ["a=b"]},
        {"enable_hierarchical_cache": True},
        {"is_embedding": True},
    ],
)
def test_compatible_colocated_arguments_are_supported(more: dict[str, object]) -> None:
    assert off_reason(args("null", **more)) is None
