"""What logs must not hold: tracebacks, and what SGLang's own checks find."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

BEGIN = "Traceback (most recent call last)"
ALARMS = ("memory leak detected", "Scheduler hit an exception", "Fatal Python error", "was never retrieved")
OWN: dict[str, str] = {
    r"RequestValidationError: <exception str\(\) failed>|fastapi/exceptions\.py\", line \d+, in __str__": (
        "FastAPI cannot print a body that it refuses where that is nested 1,000 deep"
    ),
    r"_BaseRequestContextManager|sglang_router/mini_lb\.py\", line \d+, in (flush_cache|get_server_info)": (
        "a route of stock MiniLB asks a server that is gone"
    ),
    r"openai/protocol\.py\", line \d+, in set_json_schema": "a response_format that is no object; the client is told",
    r"tokenizer_manager\.py\", line \d+, in _init_req_state\n.*TypeError: unhashable": (
        "an rid that is no string; the client is told"
    ),
    r"io_struct\.py\", line \d+, in _handle_parallel_sampling": "an n that is no number; the client is told",
    r"in send_pyobj\n.*RecursionError: .* pickling": (
        "SGLang's HTTP process cannot send its scheduler a value that is nested 1,000 deep; the client is told"
    ),
}
"""Tracebacks that are SGLang's own: a pattern of their text -> why they are passed over."""
_LAST = re.compile(
    r"^(?:\[[^\]]*\] )?([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Timeout|Broken\w*|Disconnect)\b.*)"
)


@dataclass
class Found:
    """What was found."""

    wrong: list[str] = field(default_factory=list)
    """log: what it says."""
    own: Counter[str] = field(default_factory=Counter)
    """SGLang's own, by the reason they are passed over."""


def scan(logs: Iterable[Path]) -> Found:
    """Read all of them."""
    found = Found()
    for log in logs:
        if not log.exists():
            continue
        lines = log.read_text(errors="replace").splitlines()
        for text in _tracebacks(lines):
            why = next((why for pattern, why in OWN.items() if re.search(pattern, text, re.DOTALL)), None)
            if why:
                found.own[why] += 1
            else:
                found.wrong.append(f"{log.name}: {_last(text)}")
        found.wrong += [
            f"{log.name}: {x.strip()[:200]}"
            for x, after in zip(lines, [*lines[1:], ""], strict=True)
            if any(a in x for a in ALARMS) and not any(re.search(p, after) for p in OWN)
        ]
    return found


def _tracebacks(lines: list[str]) -> Iterator[str]:
    """Each with the line before it and all that is indented below it, and the line that ends it."""
    i = 0
    while i < len(lines):
        if BEGIN in lines[i]:
            j = i + 1
            while (
                j < len(lines)
                and (not lines[j] or lines[j][0] in " \t|+^" or not _LAST.match(lines[j]))
                and j - i < 300
            ):
                j += 1
            yield "\n".join(lines[max(0, i - 1) : j + 1])
            i = j
        i += 1


def _last(text: str) -> str:
    lines = [x for x in text.splitlines() if x.strip()]
    where = [x.strip() for x in lines if x.strip().startswith("File ")]
    return f"{lines[-1].strip()[:200]} ({where[-1] if where else 'nowhere'})"
