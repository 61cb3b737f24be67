"""Causes that hold back waiting requests, derived from the decision of a round."""

from __future__ import annotations

from laps_core.length import LONG, SHORT
from laps_core.policy.types import Plan
from laps_core.receipts.receipt import Cause


def held_short(plan: Plan, *, long: bool, joint: bool, built: bool) -> Cause | None:
    """Return the cause that holds back waiting short requests. `long`: long work waits or is paused. `joint`: all
    data-parallel ranks plan together. `built`: a batch was built."""
    if plan.picked and (plan.mixed or plan.order[:1] == (SHORT,)):
        return None if built else "memory"
    if plan.held:
        return plan.held
    if joint:
        return "ranks"
    return "gap" if long and plan.decode != "first" else None


def held_long(plan: Plan, *, lacking: bool, joint: bool) -> Cause | None:
    """Return the cause that holds back waiting long prompts. `lacking`: the first prompt found too little memory."""
    if lacking:
        return "memory"
    return "ranks" if joint and LONG not in plan.order else None
