"""Plans, views, requests and canvases: the vocabulary of the engine. Standard library and NumPy only."""
