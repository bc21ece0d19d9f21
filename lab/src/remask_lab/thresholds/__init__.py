"""Thresholds of a token's probability: how many right answers they cost, and how many passes they save."""
