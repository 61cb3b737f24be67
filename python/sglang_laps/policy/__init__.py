"""The scheduling policy: pure functions and state machines. No torch, no sglang, no I/O, no clock."""
