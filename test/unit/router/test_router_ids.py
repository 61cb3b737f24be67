"""Ids of an attempt at the servers, and the ids that the client sees."""

from __future__ import annotations

import json
import re
from itertools import permutations
from typing import Any

import pytest

pytest.importorskip("sglang_router")

from sglang_router_laps.prompts.reading import CHAT, COMPLETIONS, GENERATE, batch_size
from sglang_router_laps.request.ids import Ids, fresh, ids_elsewhere


def reply(rid: Any) -> bytes:
    return json.dumps({"meta_info": {"id": rid}}).encode()


def seen(ids: Ids, rid: Any) -> Any:
    return json.loads(ids.with_client_ids(reply(rid)))["meta_info"]["id"]


def test_client_without_id_sees_same_router_id_after_retries() -> None:
    ids = Ids(None, None)
    first = ids.name
    assert list(ids.client_ids()) == [first]
    names = set()
    for _ in range(3):
        ids.renew()
        prefill, decode = ids.body_ids()
        assert (prefill, decode) == (f"{ids.name}.prefill", ids.name)
        assert ids.server_ids() == ([prefill], [decode])
        assert seen(ids, decode) == seen(ids, prefill) == first
        names.add(decode)
    assert len(names) == 3
    assert first in names


@pytest.mark.parametrize("rid", ["mine", 'm"i\\n\u00e9', "\ud800", ["a", "b"], ["a", "ab"]])
def test_client_ids_never_reach_servers_but_appear_in_replies(rid: Any) -> None:
    ids = Ids(rid, len(rid) if isinstance(rid, list) else None, first="0" * 32)
    for _ in range(3):
        ids.renew()
        for made in ids.body_ids():
            each = made if isinstance(made, list) else [made]
            assert all(re.fullmatch("[0-9a-f]{32}(.prefill)?", r) for r in each)
            assert seen(ids, made) == rid
    assert seen(ids, "another " + "f" * 32) == "another " + "f" * 32


@pytest.mark.parametrize("n", [1, 2, 10, 11, 120])
@pytest.mark.parametrize("rid", [None, "r"])
def test_no_server_id_is_prefix_of_another(rid: str | None, n: int) -> None:
    ids = Ids(rid, n)
    for _ in range(2):
        ids.renew()
        for each in ids.server_ids():
            assert len(each) == n
            assert not any(b.startswith(a) for a, b in permutations([*each, fresh()], 2))


@pytest.mark.parametrize(
    ("rid", "batch", "says"),
    [
        (7, None, "neither a string nor"),
        ({"a": 1}, None, "neither a string nor"),
        (["good", 10**30], 2, "neither a string nor"),
        (["a"], None, "1 ids for one prompt"),
        (["a"], 2, "1 ids for 2 prompts"),
        (["a", "a"], 2, "distinct"),
        (["a", ""], 2, "empty"),
    ],
)
def test_invalid_rid_is_refused(rid: Any, batch: int | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Ids(rid, batch)


@pytest.mark.parametrize("rid", ["r" * 257, ["r", "r" * 257]])
def test_router_refuses_ids_over_256_characters(rid: Any) -> None:
    """A stream repeats the id in each event, so a long id would fill the router's memory."""
    batch = len(rid) if isinstance(rid, list) else None
    with pytest.raises(ValueError, match="at most 256 characters"):
        Ids(rid, batch)
    Ids([r[:256] for r in rid] if isinstance(rid, list) else rid[:256], batch)


@pytest.mark.parametrize(
    ("endpoint", "body", "parts"),
    [
        (GENERATE, {"text": ["a", "b"]}, ["r_0", "r_1"]),
        (GENERATE, {"input_ids": [[1], [2]]}, ["r_0", "r_1"]),
        (GENERATE, {"input_ids": [1, 2]}, []),
        (COMPLETIONS, {"prompt": ["a"]}, ["r_0"]),
        (COMPLETIONS, {"prompt": "a"}, []),
        (GENERATE, {"input_embeds": [[0.1], [0.2]]}, []),
        (GENERATE, {"input_embeds": [[[0.1]], [[0.2]]]}, ["r_0", "r_1"]),
        (CHAT, {"messages": []}, []),
    ],
)
def test_each_prompt_of_batch_gets_separate_id(endpoint: str, body: dict[str, Any], parts: list[str]) -> None:
    ids = Ids("r", batch_size(endpoint, body))
    ids.renew()
    assert ids.client_ids() == {"r": None, **{part: i for i, part in enumerate(parts)}}
    assert [seen(ids, made) for made in ids.server_ids()[1]] == (parts or ["r"])


@pytest.mark.parametrize("rid", ["mine", None])
def test_another_router_derives_ids_of_first_attempt(rid: str | None) -> None:
    ids = Ids(rid, None, owner="me")
    ids.renew()
    (named,) = ids.client_ids()
    there = ids_elsewhere(named, "me")
    prefill, decode = ids.server_ids()
    assert {*prefill} <= {*there["prefill"]}
    assert {*decode} <= {*there["decode"]}
    assert rid not in there["decode"]
    # Another client's request with the same id is a different request.
    assert not rid or not {*decode} & {*ids_elsewhere(named, "you")["decode"]}


def test_empty_id_is_replaced_by_router_id() -> None:
    ids = Ids("", None)
    assert list(ids.client_ids()) == [ids.name]
