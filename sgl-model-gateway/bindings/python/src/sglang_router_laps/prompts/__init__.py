"""Prompts of a request: their contents, token counts, and the prefixes that servers have cached."""
