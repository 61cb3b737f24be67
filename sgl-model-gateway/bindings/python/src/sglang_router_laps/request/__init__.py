"""One request: what it says, where it is tried, and what of the replies goes back to the client."""
