"""Sessions: what SGLang keeps for them must not change, or go, before its time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

CLOSE = "session.session_controller.SessionController._close"
CREATE = "session.session_controller.Session.create_req"
CLEAR = "session.session_controller.SessionReqNode.clear"


def close_when_encoded(close: Callable[[Any, str], None], controller: Any, session_id: str) -> None:
    """Wrap SGLang's method: close a session whose prompts still need their pictures when these prompts have ended.
    Until then, SGLang refuses new prompts of this session. SGLang would free what the encoder still has to read, and
    the encoder would end the server."""
    session = controller.sessions[session_id]
    reqs = [node.req for node in session.req_nodes.values()]
    if any(req.multimodal_inputs is not None and not req.finished() for req in reqs):
        session.close_on_finish = True
    else:
        close(controller, session_id)


def replace_all_if_asked(session: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """End and remove all requests of a session that this one replaces, before SGLang's method, which would remove them
    from a table while it reads the table, and end the server."""
    params = req.session_params
    if params.replace and params.rid is None and not session.streaming:
        for node in session.req_nodes.values():
            node.abort()
        session.req_nodes.clear()


def clear(original: Callable[[Any, dict[str, Any]], None], node: Any, nodes: dict[str, Any]) -> None:
    """Wrap SGLang's method, which removes a request and those after it from the table of its session by their ids. A
    client can give several the same id, and the second removal would end the server."""
    with suppress(KeyError):
        original(node, nodes)


def set_apart_if_refused(req: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
    """Take a turn that its streaming session has refused out of the session, after SGLang's method. At the end of the
    turn SGLang would let the session take in the next one, also while another runs, or give its memory to both."""
    if session.streaming and req.to_finish is not None:
        req.session = None
    return req


def kept_tokens(tree_cache: Any, req: Any) -> int | None:
    """Return the tokens of the history that a streaming session keeps for this turn; None = it keeps none.

    SGLang's lookup would lend the turn the memory of the session already, and cut it where log-probabilities are asked
    for; SGLang itself drops this wish first.
    """
    session = req.session
    slot = tree_cache.session.slots.get(session.session_id) if session is not None and session.streaming else None
    return int(slot.kv.kv_committed_len) if slot is not None and slot.kv.holds_kv else None
