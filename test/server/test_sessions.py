"""Sessions of SGLang, with LAPS's hooks, without a server."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.session import session_controller
from sglang.srt.session.session_controller import Session, SessionReqNode


class Fields(SimpleNamespace):
    """A message or a request; fields that are not set are None."""

    def __getattr__(self, name: str) -> Any:
        return None


class Turns:
    """A session and what comes to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang_laps import sessions

        original: Any = SessionReqNode.clear
        monkeypatch.setattr(SessionReqNode, "clear", lambda node, nodes: sessions.clear(original, node, nodes))
        # SGLang 0.5.22 has no parameter for what makes the request.
        monkeypatch.setattr(session_controller, "Req", self._make)
        self._made_by = {"req_factory": self._make} if "req_factory" in signature(Session.create_req).parameters else {}
        self._before = sessions.replace_all_if_asked
        self.session: Any = Session(100, "a")

    def send(self, rid: str, ids: list[int], after: str | None = None, *, replace: bool = False) -> Any:
        """Return the request that SGLang makes of a turn, which has the answer 7. `after`: id of an earlier turn."""
        params = SessionParams(id="a", rid=after, replace=replace)
        message = Fields(rid=rid, input_ids=ids, session_params=params)
        self._before(self.session, message)
        return self.session.create_req(message, None, 2048, **self._made_by)

    @staticmethod
    def _make(**given: Any) -> Any:
        kept = {name: given[name] for name in ("rid", "origin_input_ids", "origin_input_ids_unpadded")}
        params = SimpleNamespace(max_new_tokens=1)
        return Fields(
            **kept,
            output_ids=[7],
            sampling_params=params,
            finished=lambda: True,
            inherit_mm_token_counts=lambda _: None,
        )


def test_one_turn_replaces_all_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang removes them from a table while it reads the table."""
    turns = Turns(monkeypatch)
    first = turns.send("1", [5])
    turns.send("2", [6], "1")
    replacing = turns.send("3", [8], replace=True)
    assert list(replacing.origin_input_ids) == [8]
    assert list(turns.session.req_nodes) == ["3"]
    assert first.to_finish is not None, "a turn that is replaced goes on"


def test_turns_of_the_same_id_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang removes each of them by its id."""
    turns = Turns(monkeypatch)
    for rid, after in (("1", None), ("2", "1"), ("2", "1"), ("2", "2")):
        turns.send(rid, [5], after)
    replacing = turns.send("3", [8], "1", replace=True)
    assert list(replacing.origin_input_ids) == [5, 7, 8]
    assert list(turns.session.req_nodes) == ["1", "3"]
