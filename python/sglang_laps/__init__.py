"""LAPS: length-aware prefill scheduling for SGLang servers that prefill."""
