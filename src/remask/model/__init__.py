"""The transformer: attention, kernels, weights and the pool of K/V. It knows no cache policy."""
