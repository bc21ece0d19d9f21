"""Depth profiling: how far a shared prefix may be reused, measured on the model at hand."""
