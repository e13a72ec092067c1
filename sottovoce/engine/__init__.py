"""Many requests at once on one device: decided in plain Python, executed in steps."""
