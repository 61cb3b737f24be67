"""Decode allocation after prefill is allowed where attention is data parallel on all TP ranks."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from sglang.srt.arg_groups import pd_disaggregation_hook

FIELDS = {
    "disaggregation_mode": "prefill", "disaggregation_transfer_backend": "mooncake", "pp_size": 1, "attn_cp_size": 1,
    "dcp_size": 1, "dp_size": 1, "tp_size": 2, "enable_dp_attention": False, "decoupled_spec_role": "null",
    "disaggregation_decode_host_receive_threshold": 1,
}  # fmt: skip


def refused(monkeypatch: pytest.MonkeyPatch, attn_dp_size: int) -> str:
    """Return the reason why the server arguments are refused; empty if they are not."""
    args = MagicMock(**FIELDS, attn_dp_size=attn_dp_size)
    for name in ("enable_pdmux", "enable_pd_role_switch", "encoder_only", "language_only", "enable_hisparse"):
        setattr(args, name, False)
    monkeypatch.setattr(pd_disaggregation_hook, "resolving_view", lambda server_args: args)
    try:
        pd_disaggregation_hook._validate_prefill_complete(SimpleNamespace())
    except ValueError as e:
        return str(e)
    return ""


def test_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "attention tensor parallelism" in refused(monkeypatch, 1)
    assert "attention tensor parallelism" not in refused(monkeypatch, 2)
