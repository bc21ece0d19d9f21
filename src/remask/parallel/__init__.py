"""Tensor parallelism: several processes that compute one model, each a part of every layer."""
