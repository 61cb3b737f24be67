"""Hostile bodies and headers, from tables of mutations."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmark.rig.servers import HOST
from faults import wire
from faults.prompts import CHAT, COMPLETIONS, GENERATE

ANSWER, REFUSAL, SOFT, ERROR, GONE, SILENCE = "answer", "refusal", "soft", "error", "gone", "silence"
"""Ends of a case: 2xx; 4xx; 2xx with an error inside; 5xx; a connection that ends without a (whole) reply; nothing."""

BASES: dict[str, dict[str, Any]] = {
    GENERATE: {"text": "How are you?", "sampling_params": {"max_new_tokens": 2, "temperature": 0}},
    COMPLETIONS: {"model": "m", "prompt": "How are you?", "max_tokens": 2, "temperature": 0},
    CHAT: {
        "model": "m", "messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 2, "temperature": 0,
    },
}  # fmt: skip
SHORT_NAMES = {GENERATE: "generate", COMPLETIONS: "completions", CHAT: "chat"}

FIELDS: dict[str, tuple[str, ...]] = {
    GENERATE: (
        "text", "input_ids", "rid", "stream", "sampling_params", "sampling_params.max_new_tokens",
        "sampling_params.temperature", "sampling_params.stop", "sampling_params.n", "sampling_params.custom_params",
        "sampling_params.custom_params.ttft_slo_ms", "return_logprob", "bootstrap_room",
    ),
    COMPLETIONS: (
        "prompt", "rid", "stream", "max_tokens", "temperature", "stop", "n", "logprobs", "custom_params",
        "custom_params.ttft_slo_ms", "stream_options",
    ),
    CHAT: (
        "messages", "messages.0", "messages.0.role", "messages.0.content", "messages.0.tool_calls", "stream",
        "max_tokens", "temperature", "n", "tools", "tool_choice", "logprobs", "custom_params.ttft_slo_ms",
        "response_format",
    ),
}  # fmt: skip
"""Members of the body that are replaced, one at a time; a number is an index of a list."""

DEEP = 1000
VALUES: dict[str, str] = {
    "null": "null",
    "true": "true",
    "empty string": '""',
    "string": '"x"',
    "minus one": "-1",
    "zero": "0",
    "denormal": "5e-324",
    "too large": "1e999",
    "not a number": "NaN",
    "huge whole": "1" + "0" * 400,
    "empty list": "[]",
    "mixed list": '[[1], "a", 2]',
    "empty object": "{}",
    "lone surrogate": '"\\ud800"',
    "deep list": "[" * DEEP + "]" * DEEP,
}
"""Replacements, as JSON text, since no serialiser writes some of them."""

_HOLE = "\u241f"
"""Placeholder in a body, replaced by the JSON text of a value."""


@dataclass(frozen=True)
class Case:
    """One request, as bytes."""

    name: str
    raw: bytes
    stream: bool = False
    quick: bool = True
    """True if the case may run among other requests: its end does not depend on a time-out."""
    promise: str | None = None
    """Required end at the router, whatever stock does; None: as stock does, or better."""
    deadly: bool = False
    """True if the case crashes the scheduler of a stock SGLang 0.5.23. Such cases are not sent to stock MiniLB, which
    would forward them: an empty text is a prefill batch of no tokens, and all samples of a prompt share a bootstrap
    room that the first sample may still occupy."""

    def wire(self, headers: Mapping[str, str]) -> bytes:
        """Return the case's bytes with further headers; without them if the case has no request line."""
        text = self.raw.lstrip(b"\r\n")
        line, end, rest = text.partition(b"\r\n")
        more = "".join(f"{k}: {v}\r\n" for k, v in headers.items()).encode()
        return self.raw[: len(self.raw) - len(text)] + line + end + more + rest if end else self.raw


def with_value(base: Mapping[str, Any], path: str, text: str) -> bytes:
    """Return ``base`` as JSON with the member at ``path`` replaced by ``text``."""
    body: Any = copy.deepcopy(dict(base))
    at, names = body, path.split(".")
    for name in names[:-1]:
        at = at[int(name)] if isinstance(at, list) else at.setdefault(name, {})
    at[int(names[-1]) if isinstance(at, list) else names[-1]] = _HOLE
    if path == "input_ids":
        del body["text"]
    return json.dumps(body, ensure_ascii=False).replace(f'"{_HOLE}"', text, 1).encode()


def _name(route: str, stream: bool, rest: str) -> str:
    return f"{SHORT_NAMES[route]}{', stream' if stream else ''}: {rest}"


def _fields() -> Iterator[Case]:
    for route, paths in FIELDS.items():
        for path, (value, text) in itertools.product(paths, VALUES.items()):
            name = f"{SHORT_NAMES[route]}: {path} = {value}"
            deadly = (route, path, value) == (GENERATE, "text", "empty string")
            if path == "rid" and text[0] == '"' < text[1]:  # of two equal ids in flight one is refused
                text = f'"{SHORT_NAMES[route]}{text[1:]}'
            raw = wire.request(route, with_value(BASES[route], path, text))
            yield Case(name, raw, promise=REFUSAL if deadly else None, deadly=deadly)


BODIES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda body: b"",
    "no JSON": lambda body: b"hello",
    "cut short": lambda body: body[:-3],
    "more behind it": lambda body: body + b"{}",
    "a list": lambda body: b"[" + body + b"]",
    "null": lambda body: b"null",
    "a number": lambda body: b"12",
    "a string": lambda body: b'"text"',
    "an empty object": lambda body: b"{}",
    "UTF-16": lambda body: body.decode().encode("utf-16"),
    "UTF-16 without mark": lambda body: body.decode().encode("utf-16-le"),
    "UTF-8 with mark": lambda body: b"\xef\xbb\xbf" + body,
    "bad UTF-8": lambda body: body.replace(b"How", b"\xff\xfe\xfd"),
    "a NUL in a string": lambda body: body.replace(b"How", b"\\u0000"),
    "a raw control character": lambda body: body.replace(b"How", b"\x01"),
    "comments": lambda body: b"/* */" + body,
    "blanks around": lambda body: b" \r\n\t" * 5000 + body + b" \n" * 5000,
    "a member twice": lambda body: body[:-1] + b', "stream": false, "stream": false}',
    "deep": lambda body: body[:-1] + b', "x": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deeper": lambda body: body[:-1] + b', "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "deepest": lambda body: b"[" * 200_000,
    "NaN and a big integer": lambda body: body[:-1] + b', "x": [NaN, 18446744073709551616, -Infinity]}',
    "many members": lambda body: body[:-1] + b"".join(b', "k%d": %d' % (i, i) for i in range(5000)) + b"}",
    "a long key": lambda body: body[:-1] + b', "' + b"k" * 200_000 + b'": 1}',
    "gzip": lambda body: gzip.compress(body, mtime=0),
    "single quotes": lambda body: body.replace(b'"', b"'"),
}
"""Changes to the text of a good body."""


def _bodies() -> Iterator[Case]:
    """Yield cases of whole bodies, and of requests for two answers: a disaggregated pair cannot share a bootstrap
    room."""
    for (route, base), stream in itertools.product(BASES.items(), (False, True)):
        body = {**base, "stream": stream}
        for name, change in BODIES.items():
            yield Case(_name(route, stream, name), wire.request(route, change(json.dumps(body).encode())), stream)
        raw = wire.request(route, with_value(body, "sampling_params.n" if route == GENERATE else "n", "2"))
        yield Case(_name(route, stream, "n = 2"), raw, stream, promise=REFUSAL, deadly=True)


TOO_LONG = "a very long value"
"""Name of the header case that the router promises to refuse; stock takes heads of any size."""
HEADERS: dict[str, tuple[bytes, ...]] = {
    "a name in capitals": (b"X-SHOUT: yes",),
    "bytes that are no ASCII": (b"x-name: caf\xe9 \xc3\xa9 \xff",),
    "an empty value": (b"x-empty:",),
    "a tab in a value": (b"x-tab: a\tb",),
    "a long value": (b"x-long: " + b"a" * 30_000,),
    TOO_LONG: (b"x-long: " + b"a" * 300_000,),
    "200 of them": tuple(b"x-%d: %d" % (i, i) for i in range(200)),
    "one twice": (b"x-twice: 1", b"x-twice: 2"),
    "no colon": (b"nonsense",),
    "a blank before the colon": (b"x-blank : 1",),
    "a blank name": (b" : 1",),
    "a folded line": (b"x-fold: a", b" b"),
    "a NUL": (b"x-nul: a\x00b",),
    "a bare CR": (b"x-cr: a\rb",),
    "no such encoding": (b"content-encoding: brotli",),
    "content type text": (b"content-type: text/plain",),
    "content type with an unknown charset": (b"content-type: application/json; charset=klingon",),
    "a length twice": (b"content-length: 3",),
    "a length and chunks": (b"transfer-encoding: chunked",),
    "an unknown transfer encoding": (b"transfer-encoding: cake",),
    "expect": (b"expect: 100-continue",),
    "expect the unexpected": (b"expect: miracles",),
    "an upgrade": (b"connection: upgrade", b"upgrade: websocket"),
    "connection names a header": (b"connection: x-hop, close", b"x-hop: 1"),
    "a cookie": (b"cookie: a=b; c=d",),
    "a proxy's": (b"x-forwarded-for: 1.2.3.4", b"forwarded: for=1.2.3.4"),
    "a bearer": (b"authorization: Bearer \xfc",),
    "two hosts": (b"host: elsewhere",),
    "ranges": (b"range: bytes=0-3", b"if-match: x"),
}
SLO = b"x-sgl-ttft-slo-ms: "
DEADLINES: dict[str, tuple[bytes, ...]] = {
    "a good one": (SLO + b"1000",),
    "nothing": (SLO,),
    "words": (SLO + b"soon",),
    "zero": (SLO + b"0",),
    "below zero": (SLO + b"-5",),
    "not a number": (SLO + b"nan",),
    "endless": (SLO + b"inf",),
    "a denormal": (SLO + b"5e-324",),
    "a huge one": (SLO + b"1e308",),
    "underscores": (SLO + b"1_000",),
    "other digits": (SLO + "\u0661\u0660\u0660".encode(),),
    "two of them": (SLO + b"1000", SLO + b"words"),
}
"""Deadline headers by case name. Stock ignores them; the router promises to refuse all but the good one."""


def _headers() -> Iterator[Case]:
    for route in (GENERATE, CHAT):
        body = json.dumps(BASES[route]).encode()
        start = f"POST {route} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        good = start.encode() + b"content-length: %d\r\n" % len(body)
        for kind, table in (("header", HEADERS), ("deadline", DEADLINES)):
            for name, lines in table.items():
                waits = name.startswith(("a length", "an unknown transfer", "an upgrade"))
                # HTTP allows to ignore an offer of another protocol. Stock then loses the body.
                good_one = name in ("a good one", "an upgrade")
                promise = ANSWER if good_one else REFUSAL if kind == "deadline" or name == TOO_LONG else None
                raw = b"\r\n".join((good[:-2], *lines, b"", body))
                yield Case(f"{SHORT_NAMES[route]}, {kind}: {name}", raw, quick=not waits, promise=promise)


def _framing() -> Iterator[Case]:
    body = json.dumps(BASES[GENERATE]).encode()
    json_ = b"host: x\r\ncontent-type: application/json\r\n"
    post = b"POST /generate HTTP/1.1\r\n"
    sized = json_ + b"content-length: %d\r\n\r\n" % len(body) + body
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    def typed(said: bytes | None) -> bytes:
        line = b"content-type: %b\r\n" % said if said else b""
        return b"host: x\r\n%bcontent-length: %d\r\n\r\n%b" % (line, len(body), body)

    lines: dict[str, bytes] = {
        "chunked": post + json_ + b"transfer-encoding: chunked\r\n\r\n" + chunks,
        "a bad chunk size": post + json_ + b"transfer-encoding: chunked\r\n\r\nzz\r\nhello",
        "a negative length": post + json_ + b"content-length: -5\r\n\r\n" + body,
        "a length in words": post + json_ + b"content-length: many\r\n\r\n" + body,
        "a length too small": post + json_ + b"content-length: 5\r\n\r\n" + body,
        "no length": post + json_ + b"\r\n",
        "HTTP/1.0": b"POST /generate HTTP/1.0\r\n" + sized,
        "HTTP/0.9": b"GET /\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/3.7": b"POST /generate HTTP/3.7\r\n" + sized,
        "no host": b"POST /generate HTTP/1.1\r\n" + sized.removeprefix(b"host: x\r\n"),
        "no content type": post + typed(None),
        "another content type": post + typed(b"text/plain"),
        "a content type of JSON": post + typed(b"Application/Vnd.X+JSON ; charset=utf-8"),
        "a content type that is none": post + typed(b"application/x/json"),
        "lower case": b"post /generate http/1.1\r\n" + sized,
        "another method": b"BREW /generate HTTP/1.1\r\n" + sized,
        "GET": b"GET /generate HTTP/1.1\r\nhost: x\r\n\r\n",
        "HEAD": b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        "PUT": b"PUT /generate HTTP/1.1\r\n" + sized,
        "another path": b"POST /generate/x HTTP/1.1\r\n" + sized,
        "a doubled slash": b"POST //generate HTTP/1.1\r\n" + sized,
        "a slash behind": b"POST /generate/ HTTP/1.1\r\n" + sized,
        "an escaped path": b"POST /%67enerate HTTP/1.1\r\n" + sized,
        "a broken escape": b"POST /%zz HTTP/1.1\r\n" + sized,
        "a path that climbs": b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
        "a path of bytes": b"GET /caf\xe9 HTTP/1.1\r\nhost: x\r\n\r\n",
        "a long path": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        "a query": b"POST /generate?x=%ff&stream=1 HTTP/1.1\r\n" + sized,
        "an absolute target": b"POST http://elsewhere/generate HTTP/1.1\r\n" + sized,
        "no blank": b"POST\r\n\r\n",
        "blank lines first": b"\r\n\r\n" + post + sized,
        "bytes of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
        "two in one piece": (post + sized) * 2,
        "OPTIONS": b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    }
    slow = {"no length", "a bad chunk size", "HTTP/2", "bytes of TLS", "no blank", "HTTP/0.9", "blank lines first"}
    for name, raw in lines.items():
        yield Case(f"framing: {name}", raw, quick=name not in slow)


CASES: tuple[Case, ...] = (*_fields(), *_bodies(), *_headers(), *_framing())
