"""Content types of bodies that are read as JSON."""

from __future__ import annotations

import email.message

import pytest

pytest.importorskip("sglang_router")

from sglang_router_laps.request.body import require_json
from sglang_router_laps.request.replies import Rejection


@pytest.mark.parametrize(
    "said",
    [
        *(
            "",
            "application/json",
            "application/json;",
            "Application/JSON; charset=x",
            " application/json ",
            "text/json",
        ),
        *("application/vnd.a+json", "application/+json", "application/x/json", "application/a/b+json", "application"),
        *("/json", "json", "application/json,text/plain", "application /json", ";application/json", "text/plain"),
    ],
)
def test_require_json_accepts_same_content_types_as_fastapi(said: str) -> None:
    message = email.message.Message()
    message["content-type"] = said
    form = message.get_content_subtype()
    scope = {"headers": [(b"content-type", said.encode())]}
    if said and message.get_content_maintype() == "application" and (form == "json" or form.endswith("+json")):
        require_json(scope)
    else:
        with pytest.raises(Rejection):
            require_json(scope)


def test_missing_content_type_returns_422() -> None:
    with pytest.raises(Rejection) as refused:
        require_json({"headers": []})
    assert refused.value.reply.status == 422
