"""The application: what clients send, and what operators ask for."""
