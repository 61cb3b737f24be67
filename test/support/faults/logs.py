"""Scan of logs for tracebacks and for alarms of SGLang's own checks."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

BEGIN = "Traceback (most recent call last)"
ALARMS = ("memory leak detected", "Scheduler hit an exception", "Fatal Python error", "was never retrieved")
KNOWN_TRACEBACKS: dict[str, str] = {
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
    r"common/conn\.py\", line \d+, in _run_prefill_recompute": (
        "a decode server that was told to retract asks a prefill server that is gone; the request is tried elsewhere"
    ),
    r"in send_pyobj\n.*RecursionError: .* pickling": (
        "SGLang's HTTP process cannot send its scheduler a value that is nested 1,000 deep; the client is told"
    ),
}
"""Tracebacks of SGLang's own bugs: a pattern of their text -> reason to ignore them."""
_RAISED = r"(?:\[[^\]]*\] )?[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Timeout|Broken\w*|Disconnect)\b"
_ONE = rf".*{re.escape(BEGIN)}.*(?:\n(?!{_RAISED}).*){{0,300}}(?:\n.*)?"
"""Pattern of a traceback up to its exception's line; lines of other threads can lie in between."""
_CHAIN = r"(?:\n.*)?\n(?:During handling of the above exception|The above exception was the direct cause).*(?:\n.*)?\n"
_TRACEBACK = re.compile(rf"^(?:.*\n)?{_ONE}(?:{_CHAIN}{_ONE})*", re.MULTILINE)
"""Pattern of a traceback with the line before it and all tracebacks chained to it."""


@dataclass
class ScanResult:
    """Result of a scan."""

    wrong: list[str] = field(default_factory=list)
    """Tracebacks and alarms, as "log: text"."""
    own: Counter[str] = field(default_factory=Counter)
    """Ignored tracebacks of SGLang, by reason."""


def scan(logs: Iterable[Path]) -> ScanResult:
    """Scan all logs."""
    found = ScanResult()
    for log in logs:
        if not log.exists():
            continue
        lines = log.read_text(errors="replace").splitlines()
        for text in _TRACEBACK.findall("\n".join(lines)):
            why = next((why for pattern, why in KNOWN_TRACEBACKS.items() if re.search(pattern, text, re.DOTALL)), None)
            if why:
                found.own[why] += 1
            else:
                found.wrong.append(f"{log.name}: {_last_line(text)}")
        found.wrong += [
            f"{log.name}: {x.strip()[:200]}"
            for x, after in itertools.pairwise((*lines, ""))
            if any(a in x for a in ALARMS) and not any(re.search(p, after) for p in KNOWN_TRACEBACKS)
        ]
    return found


def _last_line(text: str) -> str:
    lines = [x for x in text.splitlines() if x.strip()]
    where = [x.strip() for x in lines if x.strip().startswith("File ")]
    return f"{lines[-1].strip()[:200]} ({where[-1] if where else 'nowhere'})"
