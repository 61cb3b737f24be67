"""Live view of many servers in a terminal."""
