"""What clients ask for and when, for real servers and for simulated ones alike."""
