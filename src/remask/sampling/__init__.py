"""Samplers: which candidates become final in a step, and as which tokens."""
