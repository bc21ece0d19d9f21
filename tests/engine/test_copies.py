"""Stored K/V that a request gets a copy of (`Traits.copies`)."""

import numpy as np
import pytest
import torch

from remask.engine.canvas_state import Move
from tests.engine.support import make_engine


@pytest.mark.parametrize("source", [[4, 5, 6], [4, 7, 5]])
@pytest.mark.parametrize("target", [[20, 21, 22], [30, 12, 25]])
def test_copies_between_runs_and_scattered_slots(source: list[int], target: list[int]) -> None:
    """Where memory is in pieces, a stored prefix may be a run and the canvas' slots none, or the other way round."""
    engine = make_engine(page_size=1)
    pool, layers = engine.pool, engine.model.config.layers
    for tensor in (*pool.k, *pool.v):
        tensor.copy_(torch.randn(tensor.shape))
    before = [(k.clone(), v.clone()) for k, v in zip(pool.k, pool.v, strict=True)]
    engine.runner.move(Move(np.array(source), np.array(target), layers - 1))
    for layer, (k, v) in enumerate(before):
        if layer < layers - 1:
            k[target], v[target] = k[source], v[source]
        assert torch.equal(pool.k[layer], k)
        assert torch.equal(pool.v[layer], v)
