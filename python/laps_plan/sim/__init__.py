"""A discrete-event simulator of prefill servers: the policies are those that are served, only time is replaced."""
