"""Likelihoods of given responses under masked models, and perplexities of generated ones under a judge."""
