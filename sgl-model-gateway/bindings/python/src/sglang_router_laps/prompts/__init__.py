"""Prompts of a request: their contents, token counts and fingerprints."""
