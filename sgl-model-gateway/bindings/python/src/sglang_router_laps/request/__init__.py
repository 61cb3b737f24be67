"""One request: reading its body, attempts at servers, and replies to the client."""
