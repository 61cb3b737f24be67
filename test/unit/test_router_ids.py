"""Under which ids an attempt is known at the servers, and what the client sees of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("sglang_router")

from sglang_router_laps.prompts.reading import CHAT, COMPLETIONS, GENERATE, batch_size
from sglang_router_laps.request.ids import Ids
from sglang_router_laps.request.ids import ids as ids_of


def test_a_request_without_an_id_gets_one_for_each_attempt() -> None:
    ids = Ids(None, None)
    assert ids.chosen() == []
    seen = []
    for _ in range(2):
        ids.renew()
        prefill, decode = ids.members()
        assert prefill == {"rid": f"{ids.rid}.prefill"}
        assert decode == {"rid": ids.rid}
        assert ids.known_as() == ([f"{ids.rid}.prefill"], [ids.rid])
        assert ids.as_asked(ids.rid.encode()) == ids.rid.encode()
        seen.append(ids.rid)
    assert seen[0] != seen[1]


def test_the_first_attempt_goes_by_the_id_of_the_client() -> None:
    ids = Ids("mine", None)
    ids.renew()
    assert ids.members() == ({"rid": "mine.prefill"}, {})
    assert ids.chosen() == ["mine", "mine"]
    assert ids.as_asked(b"mine.prefill") == b"mine.prefill"


@pytest.mark.parametrize("rid", ["mine", 'm"i\\n\u00e9', ["a", "b"]])
def test_a_further_attempt_has_ids_of_its_own_and_the_client_sees_those_it_chose(rid: Any) -> None:
    ids = Ids(rid, None)
    for _ in range(3):
        ids.renew()
    (at_prefill,), (at_decode,) = (list(m.values()) for m in ids.members())
    names, fresh = (at_prefill, at_decode) if isinstance(rid, list) else ([at_prefill], [at_decode])
    assert names == [f"{f}.prefill" for f in fresh]
    assert not {*fresh} & {*(rid if isinstance(rid, list) else [rid])}
    assert json.loads(ids.as_asked(json.dumps(at_decode).encode())) == rid
    assert ids.rid == rid


@pytest.mark.parametrize("rid", [7, {"a": 1}, ["good", 10**30], ["\ud800"]])
def test_what_is_no_id_goes_as_it_came_and_then_without_a_name(rid: Any) -> None:
    ids = Ids(rid, None)
    ids.renew()
    assert ids.members() == ({}, {})
    ids.renew()
    prefill, decode = ids.members()
    json.dumps([prefill, decode])
    if isinstance(rid, list):
        assert all(r is None or isinstance(r, str) for r in (*prefill["rid"], *decode["rid"]))
    else:
        assert (prefill, decode) == ({"rid": None}, {"rid": None})


@pytest.mark.parametrize(
    ("endpoint", "body", "parts"),
    [
        (GENERATE, {"text": ["a", "b"]}, ["r_0", "r_1"]),
        (GENERATE, {"input_ids": [[1], [2]]}, ["r_0", "r_1"]),
        (GENERATE, {"input_ids": [1, 2]}, ["r"]),
        (COMPLETIONS, {"prompt": ["a"]}, ["r_0"]),
        (COMPLETIONS, {"prompt": "a"}, ["r"]),
        (GENERATE, {"input_embeds": [[0.1], [0.2]]}, ["r"]),
        (GENERATE, {"input_embeds": [[[0.1]], [[0.2]]]}, ["r_0", "r_1"]),
        (CHAT, {"messages": []}, ["r"]),
    ],
)
def test_the_parts_of_a_batch_have_ids_of_their_own(endpoint: str, body: dict[str, Any], parts: list[str]) -> None:
    ids = Ids("r", batch_size(endpoint, body))
    ids.renew()
    assert ids.known_as()[1] == parts
    assert ids.chosen() == ["r", *parts]


def test_a_long_id_is_shortened_for_people() -> None:
    assert len(Ids("x" * 1000, None).name) < 100
    assert Ids("x" * 200, None).name == "x" * 200


@pytest.mark.parametrize("rid", ["", 7, None, ["", 7, "good"], {"a": 1}, True])
def test_what_is_no_id_is_not_aborted(rid: Any) -> None:
    assert ids_of(rid, None) == (["good"] if isinstance(rid, list) else [])
