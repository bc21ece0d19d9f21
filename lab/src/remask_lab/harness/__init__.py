"""Benchmarks with answers: configs, data formats, the shared system prompt, scoring, and lm-eval's tasks."""
