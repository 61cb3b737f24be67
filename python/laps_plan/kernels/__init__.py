"""Profiles of devices from kernels that NVIDIA measured (AIConfigurator)."""
