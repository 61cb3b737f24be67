"""What is recorded for operators: counts, times to first token, pools and pressures as they were."""
