"""Pages of the documentation that commands write from result files: docs/lab/results.md and others."""
