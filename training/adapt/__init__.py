"""Makes a masked diffusion model of a causal one: a low-rank adapter, trained with attention that looks both ways."""
