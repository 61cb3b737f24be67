"""A request as its client made it, and what of it is still needed from one attempt to the next."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from laps_core.pools.pressure import Pool
from laps_core.protocol import DEADLINE_HEADER
from starlette.types import Scope

from ..pools.ask import Ask
from ..servers.instances import PrefillInstance
from ..servers.prefixes import fingerprint
from ..servers.upstream import forwarded
from . import body as bodies
from . import logprobs
from .ids import Ids
from .prompt import Prompt, batch_size, read_prompt
from .tokens import START_BYTES_PER_TOKEN, TokenCounter

PROMPTS_MAX = 64
"""Of a batch, so many prompts are looked up in the prefix indexes: they stand for the rest."""
NOTHING = Ask(0)
"""What a request asks whose prompt is not known yet, or of no more use."""


class Call:
    """A request whose body has been read."""

    def __init__(self, endpoint: str, scope: Scope, raw: bytes, body: dict[str, Any]) -> None:
        """``raw`` and ``body`` are what ``body.parse`` gave."""
        self.endpoint = endpoint
        self.arrived = time.monotonic()
        self.headers = forwarded(scope["headers"])
        self.stream = bool(body.get("stream", False))
        self.logprobs = logprobs.wanted(body)
        self.batch = batch_size(endpoint, body)
        self.ids = Ids(endpoint, body)
        self.slo_ms: float | None = None
        """Deadline for the first token (milliseconds after arrival)."""
        self.length_class: Pool = "short"
        self.first_token_seen = False
        self.prompt: Prompt | None = None
        self.ask = NOTHING
        self._raw = raw
        self._body = body

    @property
    def age_s(self) -> float:
        """Since its arrival (seconds)."""
        return time.monotonic() - self.arrived

    def take_deadline(self) -> None:
        """Move the deadline header into the body. Raises BadRequest."""
        texts = self.headers.popall(DEADLINE_HEADER, [])
        if texts:
            self.slo_ms = bodies.read_deadline(texts)
            self._raw, self._body = bodies.add_deadline(self.endpoint, self._raw, self._body, self.slo_ms)

    def read(self, counter: TokenCounter) -> None:
        """Read and measure the prompt; of the body stays what an attempt needs: its bytes and its members' names."""
        self.prompt = read_prompt(self.endpoint, self._body)
        self.ask = measure(self.prompt, counter, len(self._raw))
        self._raw = bodies.without_routed(self._raw, self._body)
        self._body = {k: None for k in self._body if k not in bodies.ROUTED}

    def wires(self, prefiller: PrefillInstance) -> tuple[bytes, bytes]:
        """The bodies of an attempt for the prefill and for the decode server, which meet in fresh rooms."""
        meeting = {
            "bootstrap_host": self._each(lambda: prefiller.bootstrap_host),
            "bootstrap_port": self._each(lambda: prefiller.bootstrap_port),
            "bootstrap_room": self._each(lambda: random.getrandbits(62)),
        }
        prefill, decode = (bodies.splice(self._raw, self._body, {**meeting, **ids}) for ids in self.ids.members())
        return prefill, decode

    def _each(self, value: Callable[[], Any]) -> Any:
        return value() if self.batch is None else [value() for _ in range(self.batch)]

    def forget(self) -> None:
        """No other attempt will need it, and a stream can be long."""
        self._raw, self.prompt, self.ask = b"", None, NOTHING


def measure(prompt: Prompt, counter: TokenCounter, size: int) -> Ask:
    """Measure ``prompt``, of a request body of ``size`` bytes.

    What could not be read may be as long as the body allows.
    """
    tokens = counter.count(prompt)
    if prompt.unread:
        tokens = max(tokens, round(size / START_BYTES_PER_TOKEN))
    prints = [fingerprint(t.encode("utf-8", "surrogatepass"), prompt.media_at) for t in prompt.texts[:PROMPTS_MAX]]
    prints += [fingerprint(i) for i in prompt.ids[: PROMPTS_MAX - len(prints)]]
    return Ask(tokens, prints, prompt.media - sum(len(p.media) for p in prints))
