"""Depth profiling: in how many layers a model may reuse a shared prefix."""
