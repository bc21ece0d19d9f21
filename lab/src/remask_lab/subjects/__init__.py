"""What happens inside a model while it denoises: measured on the engine's own passes."""
