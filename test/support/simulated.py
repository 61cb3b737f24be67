"""Profiles and lengths that the simulator's tests share."""

from __future__ import annotations

from laps_core.latency.step import Coefficients
from laps_plan.profile import Profile
from laps_plan.traffic.lengths import log_uniform, mix, uniform

PROFILE = Profile(
    name="test", source="made up", coefficients=Coefficients(2e-9, 2e-5, 1e-9, 1e-5, 5e-3), graph_fixed_s=3e-3,
    poll_s=1e-9,
)  # fmt: skip


HOST_PROFILE = Profile(
    name="host", source="made up", coefficients=Coefficients(2e-9, 2e-5, 1e-9, 1e-5, 5e-3), front_s=1e-3, poll_s=1e-4,
    front_token_s=1e-6, step_host_s=5e-4, request_host_s=2e-4, reply_s=3e-4, spread=(0.9, 1.0, 1.3),
)  # fmt: skip


MIX = mix(uniform(8, 256), log_uniform(1000, 20000), 0.1)


CHUNK = 2048
