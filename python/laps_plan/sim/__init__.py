"""Discrete-event simulator of prefill servers: LAPS runs the policy code of real servers, only time is replaced."""
