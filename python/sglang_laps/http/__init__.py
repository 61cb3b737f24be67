"""HTTP routes of LAPS in the application of an SGLang server."""
