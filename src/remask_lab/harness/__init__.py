"""Benchmarks under a shared system prompt: their configs, local data, scoring, and the way through lm-eval."""
