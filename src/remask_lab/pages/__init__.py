"""Pages of the documentation that commands write from result files: docs/results.md and docs/gallery.md."""
