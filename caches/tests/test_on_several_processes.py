"""The caches on a model in two processes, whose heads and vocabulary are cut, and on weights of few bits."""

from typing import Any

import pytest

from remask import LLM, EngineConfig
from tests.model import test_quantized as quantized
from tests.parallel.conftest import lenders, ranks
from tests.parallel.test_ranks import COMMON, GOLDEN, SAMPLING, lead_of

__all__ = ["lenders", "ranks"]  # fixtures


@pytest.mark.thorough
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("cache", "settings", "sampling"),
    [
        ("acache", {"ratio": 0.3}, {}),
        ("elastic-cache", {"window": 8}, {"cfg_scale": 0.5}),
        ("entropy-cache", {"threshold": 3.0, "recent": 2}, {}),
        ("none", {}, {"steps": None, "block_length": None, "remasking": "slowfast"}),
    ],
    ids=str,
)
def test_answers_are_those_of_one_process(cache: str, settings: dict[str, Any], sampling: dict[str, Any]) -> None:
    prompts, found = [[*range(first, first + 28)] for first in (3, 40)], []
    asked = {name: value for name, value in {**SAMPLING, **sampling}.items() if value is not None}
    for size in (2, 1):
        with LLM(GOLDEN, tensor_parallel=size, engine=EngineConfig(max_model_len=64), **COMMON) as llm:
            outputs = llm.generate(prompts, asked, prefix_length=20, cache=cache, cache_config=settings)
            found.append([(each.token_ids, each.usage.row_layers) for each in outputs])
            if size == 2:  # what ended requests and the store have held is gone; the pool stays
                llm.engine.store.drop()
                names = lead_of(llm)._names
                assert (len(names._storages), len(names._objects)) == (0, 1)
    assert found[0] == found[1]


@pytest.mark.thorough
@pytest.mark.parametrize("cache", ["elastic-cache", "acache", "entropy-cache"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_few_bits(kind: Any, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantized.CACHE_SETTINGS, "elastic-cache", {"window": 4})
    quantized.test_every_cache_policy_runs_on_few_bits(kind, cache)
