"""What a request may ask, and what the engine reports of it. NumPy only."""
