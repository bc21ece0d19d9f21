"""`scripts/gpu`: proves and measures the engine on the device at hand, part by part, in a few minutes."""
