"""LAPS: length-aware prefill scheduling for SGLang prefill servers."""

__version__ = "0.1.0"
