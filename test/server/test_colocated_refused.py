"""Servers that prefill and decode for which LAPS turns itself off once the scheduler exists, with the reason in one
line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_laps import compat

DRAFTS = compat.release().drafts_in_pauses


def scheduler(**more: Any) -> Any:
    """Return a supported scheduler, with ``more`` as changed fields."""
    runner = SimpleNamespace(model=torch.nn.Module(), attn_backend=None)
    found = {
        "is_generation": True,
        "tp_worker": SimpleNamespace(model_runner=runner),
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "decode_offload_manager": None,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
    }
    return SimpleNamespace(**{**found, **more})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, None),
        ({"is_hybrid_swa": True}, None),
        ({"is_hybrid_ssm": True}, None),
        ({"is_hybrid_ssm": True, "spec_algorithm": SpeculativeAlgorithm.EAGLE}, None),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "an encoder-decoder model"),
        ({"decode_offload_manager": object()}, "KV caches of streams are offloaded"),
    ],
)
def test_unsupported_models_and_caches_are_named_in_reason(
    mixin: Any, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], says: str | None
) -> None:
    from sglang_laps import colocated, group
    from sglang_laps.passes import no_slices

    monkeypatch.setattr(group, "why_not", lambda _: "there is one rank")
    monkeypatch.setattr(no_slices, "_refused", lambda _, together: None)
    monkeypatch.setattr(no_slices, "decoder_layers", lambda _: [])
    why = colocated.why_not(scheduler(**more))
    if says is None:
        assert why is None
    else:
        assert why is not None
        assert says in why
        assert "\n" not in why


def test_generation_needs_slices_or_coordinated_dp_ranks(mixin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_laps import colocated, group
    from sglang_laps.passes import no_slices
    from sglang_laps.passes.layers import NoLayers

    alone: list[str | None] = ["there is one rank"]
    monkeypatch.setattr(group, "why_not", lambda _: alone[0])
    monkeypatch.setattr(no_slices, "_refused", lambda _, together: "the model is compiled")
    assert colocated.why_not(scheduler()) == "no decode step could run in a long prefill: the model is compiled"

    assert colocated.why_not(scheduler(is_generation=False)) is None, "a server that embeds has no decode steps"

    def none(_: Any) -> None:
        raise NoLayers("Toy has no list of layers")

    monkeypatch.setattr(no_slices, "_refused", lambda _, together: None)
    monkeypatch.setattr(no_slices, "decoder_layers", none)
    assert "Toy has no list of layers" in str(colocated.why_not(scheduler()))
    alone[0] = None
    assert colocated.why_not(scheduler()) is None, "ranks that plan together decode between their steps"
    monkeypatch.setenv(colocated.COORDINATION, "1")
    for drafts in (False, True):
        spec = SimpleNamespace(is_none=lambda drafts=drafts: not drafts)
        assert (colocated.why_not(scheduler(spec_algorithm=spec)) is not None) == drafts


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"speculative_algorithm": "NGRAM"}, f"speculative decoding {'with NGRAM' if DRAFTS else 'on SGLang'}"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
    ],
)
def test_refused_flags_leave_stock_scheduler_with_reason_in_status(
    mixin: Any, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    from laps_core.config import LapsConfig
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang_laps import scheduler as module
    from sglang_laps import seams
    from sglang_laps.start import why_off

    args = SimpleNamespace(disaggregation_mode="null", pp_size=1, **flags)
    monkeypatch.setattr("sglang_laps.start.resolved", lambda args: args)
    monkeypatch.setattr(seams, "require_applied", lambda: None)

    def init(self: Any) -> None:
        self.server_args = args

    stock = type("Stock", (), {"__init__": init, "get_prefill_adder_class": lambda _: PrefillAdder})
    me: Any = module.scheduler_class(stock, LapsConfig())()
    assert me.laps is None
    assert says in str(why_off(me, PrefillAdder))
    told = me.laps_status()
    assert (told["enabled"], says in told["reason"]) == (False, True)
    (line,) = [r.getMessage() for r in caplog.records if "LAPS scheduler is off" in r.getMessage()]
    assert says in line
