"""Emulated devices: real servers on a machine without a GPU, whose steps last as long as a profile says.

A tiny model really runs, and its time is hidden in the step. Scheduler, HTTP, router and transfers are the real ones.
"""

ENV = "SGLANG_LAPS_EMULATE"
"""Environment variable that names the device (see ``spec``), for every scheduler process; --laps-emulate sets it."""
