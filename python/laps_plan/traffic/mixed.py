"""Traffic without a recording: a mix described by hand, or the lengths that a running server has counted."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable

from laps_core.protocol import STATUS_ROUTE, read_status
from laps_core.protocol import Lengths as Counted

from laps_plan import asking
from laps_plan.traffic.given import Lengths
from laps_plan.traffic.lengths import Sizes, fixed, lmsys, log_uniform, uniform

LONGEST = 10_000_000
"""Maximum tokens of a prompt described by hand."""
_PART = re.compile(r"\s*(?P<share>[\d.]+)\s*%\s*(?P<kind>[a-z]+)(?::(?P<low>\d+)(?:-(?P<high>\d+))?)?\s*")
_KINDS: dict[tuple[str, int], Callable[..., Sizes]] = {
    ("lmsys", 0): lmsys,
    ("lmsys", 1): lmsys,
    ("fixed", 1): fixed,
    ("uniform", 2): uniform,
    ("log", 2): log_uniform,
}
"""Kinds of lengths, by name and number of parameters."""
KINDS = "lmsys, lmsys:CAP, fixed:N, uniform:A-B, log:A-B"


def by_hand(text: str) -> Lengths:
    """Return lengths described such as "95% lmsys:256, 5% log:1024-8192". Raises ValueError."""
    shares, kinds = [], []
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"{part.strip()!r} is not SHARE% KIND; kinds: {KINDS}")
        try:
            share = float(found["share"])
        except ValueError:
            raise ValueError(f"{found['share']!r} is not a share") from None
        lengths = [int(found[end]) for end in ("low", "high") if found[end]]
        kind = _KINDS.get((found["kind"], len(lengths)))
        if kind is None or not all(1 <= n <= LONGEST for n in lengths) or lengths != sorted(lengths):
            raise ValueError(f"{part.strip()!r}: no such lengths; kinds: {KINDS}, with 1 <= A <= B <= {LONGEST}")
        shares.append(share)
        kinds.append(kind(*lengths))
    if abs(sum(shares) - 100.0) > 0.5:
        raise ValueError(f"the shares of {text!r} add up to {sum(shares):g}%, not to 100%")
    ends = list(itertools.accumulate(shares))
    return lambda rng: (rng.choices(kinds, cum_weights=ends)[0](rng), 0)


def counted(lengths: Counted) -> Lengths:
    """Return lengths as a server has counted them: uniform within a bucket, with the mean of cached tokens of the
    bucket.

    Raises ValueError if no request was counted.
    """
    rows = []
    for before, b in zip([0, *(b.up_to for b in lengths.buckets)], lengths.buckets, strict=False):
        if b.requests:
            # The last bucket also holds longer requests.
            top = max(b.up_to, round(b.new_tokens / b.requests))
            low = max(before, int(b.up_to / 2**0.5))
            rows.append((b.requests, min(low + 1, top), top, round(b.cached_tokens / b.requests)))
    if not rows:
        raise ValueError("no request was counted yet")
    ends = list(itertools.accumulate(row[0] for row in rows))

    def draw(rng: random.Random) -> tuple[int, int]:
        _, low, top, cached = rng.choices(rows, cum_weights=ends)[0]
        return rng.randint(low, top), cached

    return draw


def ask(url: str, timeout_s: float = 10.0) -> tuple[Lengths, float, int]:
    """Return (lengths, requests per second, requests counted) of the prefill server or router at ``url``, requested
    with the key in the environment variable ``asking.KEY`` if it is set.

    Raises ValueError (one line) if the server reports no lengths.
    """
    whole = f"{url.rstrip('/')}/{STATUS_ROUTE}"
    body = asking.get(url, STATUS_ROUTE, timeout_s)
    try:
        status = read_status(body)
    except ValueError as e:
        raise ValueError(f"{whole}: {e}") from None
    if status.lengths is None:
        raise ValueError(f"{whole} reports no lengths: LAPS is off, or an older release")
    try:
        lengths = counted(status.lengths)
    except ValueError as e:
        raise ValueError(f"{whole}: {e}") from None
    requests = sum(b.requests for b in status.lengths.buckets)
    return lengths, requests / max(status.lengths.seconds, 1e-3), requests
