"""Layers that share a choice of rows (dLLM-Cache with `select_layers`), beside canvases that cut their stages."""

from typing import Any

import pytest
import torch

from remask.model.pool import Pool
from remask.model.stage import Pick
from remask.model.transformer import Transformer
from remask.policies import parse
from remask.policies.bicache import DepthLookup
from tests.engine.support import MODELS, Work, poisoned_engine, request, run


def policy(name: str, **settings: Any) -> Any:
    return parse(name, settings, lambda: DepthLookup({}))


def dllm(layers: int, name: str = "dllm-cache", **settings: Any) -> Any:
    return policy(name, response_interval=5, ratio=0.4, select_layers=layers, **settings)


@pytest.mark.parametrize(("layers", "choosing"), [(1, [1, 2, 3]), (2, [1, 3]), (3, [1])])
def test_only_the_first_layer_of_those_that_share_compares(
    monkeypatch: pytest.MonkeyPatch, layers: int, choosing: list[int]
) -> None:
    compared: list[int] = []
    rows: list[list[int]] = []
    choose, partial_layer = Transformer._choose, Transformer._partial_layer

    def watched(self: Transformer, h: Any, layer: int, *rest: Any) -> Any:
        compared.append(layer)
        return choose(self, h, layer, *rest)

    def layer_run(self: Transformer, h: Any, layer: int, stage: Any, pool: Pool, *rest: Any) -> Any:
        out = partial_layer(self, h, layer, stage, pool, *rest)
        picks: tuple[Pick, ...] = stage.partial.picks
        rows.extend(sorted(pick.chosen[-1].tolist()) for pick in picks)
        return out

    monkeypatch.setattr(Transformer, "_choose", watched)
    monkeypatch.setattr(Transformer, "_partial_layer", layer_run)
    engine = poisoned_engine(MODELS["llada"])
    run(engine, [Work(request("r", 10, steps=4, max_tokens=8), dllm(layers))])
    passes = len(rows) // 3
    assert passes == 3, "the first of four renews all"
    assert compared == choosing * passes
    for start in range(0, len(rows), 3):
        for layer in range(1, 4):
            first = layer - (layer - 1) % layers
            assert rows[start + layer - 1] == rows[start + first - 1]


def test_rows_are_marked_on_the_device_once_they_are_needed() -> None:
    engine = poisoned_engine(MODELS["llada"])
    run(engine, [Work(request("r", 10), dllm(1))])
    assert engine.pool._picked is None
    run(engine, [Work(request("s", 10), dllm(2))])
    assert engine.pool.picked.dtype == torch.bool
