"""An abort that comes before its request has been sent to the scheduler reaches the scheduler after the request."""

from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager


def test_abort_follows_its_request() -> None:
    sent: list[Any] = []
    state = SimpleNamespace(abort_sent=False, dispatched=False)
    manager: Any = SimpleNamespace(
        rid_to_state={"one": state},
        _dispatch_to_scheduler=lambda message: sent.append(message.rid),
        enable_metrics=False,
    )
    manager.abort_request = lambda rid: TokenizerManager.abort_request(manager, rid)
    manager.abort_request("one")
    manager.abort_request("one")
    assert sent == ["one"]
    sent.append("the request")
    TokenizerManager._mark_state_dispatched(manager, "one")
    assert sent == ["one", "the request", "one"]
    TokenizerManager._mark_state_dispatched(manager, "another")
    manager.abort_request("one")
    assert len(sent) == 3
