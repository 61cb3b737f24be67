"""Requests, control messages and adapters that would end the scheduler: they are refused, or answered, before."""
