"""A stream passed on event by event: what breaks in the middle of one leaves no half of it with the client."""

from __future__ import annotations

END = b"\n\n"


class Events:
    """Holds back the beginning of an event until its end has come."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def feed(self, chunk: bytes) -> bytes:
        """The events that ``chunk`` completes."""
        held = self._held
        if not held:
            if chunk.endswith(END):
                return chunk
        elif held[-1].endswith(b"\n") and chunk.startswith(b"\n"):
            # The end of an event, cut in two.
            whole, rest = b"".join(held) + b"\n", chunk[1:]
            self._held = []
            return whole + self.feed(rest) if rest else whole
        cut = chunk.rfind(END) + len(END)
        if cut < len(END):
            held.append(chunk)
            return b""
        whole = b"".join((*held, chunk[:cut]))
        self._held = [chunk[cut:]] if cut < len(chunk) else []
        return whole

    def flush(self) -> bytes:
        """What is left when the stream has ended."""
        rest = b"".join(self._held)
        self._held = []
        return rest
