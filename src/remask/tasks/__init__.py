"""Tasks that the bundled models are trained for. Standard library only."""
