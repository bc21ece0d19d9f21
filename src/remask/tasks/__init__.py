"""Tasks that the bundled models are trained for, with their settings and questions."""
