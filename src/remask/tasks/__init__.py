"""Tasks that the bundled models are trained for, and what their settings may be."""
