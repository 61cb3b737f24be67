"""The servers behind the router: connections to them, work in flight there, health and load."""
