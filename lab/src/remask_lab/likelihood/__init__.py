"""Likelihoods of given responses under masked models, and perplexities of generated ones under a judge."""

SCHEDULES = ("cosine", "linear")
"""How noise falls along the chain of a uniform model."""
MAX_ROWS = 4096  # rows of a pass, where a canvas has fewer
