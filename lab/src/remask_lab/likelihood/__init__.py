"""Likelihoods of given responses under masked models, and perplexities of generated ones under a judge."""

MAX_ROWS = 4096  # rows of a pass, where a canvas has fewer
