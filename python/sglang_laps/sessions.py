"""Sessions with pictures, video or sound, closed by a client or by their time limit while their prompts are not done.

SGLang then frees what the encoder still has to read, and the encoder ends the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CLOSE = "session.session_controller.SessionController._close"


def close_when_encoded(close: Callable[[Any, str], None], controller: Any, session_id: str) -> None:
    """Wrap SGLang's method: close a session whose prompts still need their pictures when these prompts have ended.
    Until then, SGLang refuses new prompts of this session."""
    session = controller.sessions[session_id]
    if any(_needs_pictures(node.req) for node in session.req_nodes.values()):
        session.close_on_finish = True
    else:
        close(controller, session_id)


def _needs_pictures(req: Any) -> bool:
    return req.multimodal_inputs is not None and not req.finished()
