"""LAPS: length-aware prefill scheduling for SGLang prefill servers."""
