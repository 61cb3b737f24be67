"""Additions of the host platform to SGLang on a CPU: attention, and corrections of code that assumes a GPU."""
