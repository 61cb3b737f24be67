"""Choice of the next batch: the pacer, and the rules that the pacer asks."""
