"""Memory that is measured against the formula, for every policy on every kind of model."""

from dataclasses import replace
from typing import Any

import pytest

from remask import LLM, EngineConfig
from remask.checks import ModelKind
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.families import preset
from remask.policies import names_for, parse
from remask.policies.bicache import DepthLookup
from remask_lab.subjects.memory import Crowd, formula, measure_memory
from tests.sampling_fields import flat_params

SETTINGS: dict[str, dict[str, Any]] = {
    "bicache": {"depth": 1},
    "bicache+dllm-cache": {"depth": 1},
    "bicache+block-dual": {"depth": 2},
    "elastic-cache": {"window": 4},
}
COMPOSED = ("bicache+dllm-cache", "bicache+block-dual")
KINDS: dict[str, ModelKind] = {
    "llada-tiny": "masked",
    "dream-tiny": "masked",
    "gidd-tiny": "uniform",
    "sdar-tiny": "block_causal",
    "diffusion-gemma-tiny": "block_causal",
}
CASES = [
    (model, cache, sampling)
    for model, kind in KINDS.items()
    for cache in (*names_for(kind), *(COMPOSED * (kind == "masked")))
    for sampling in ({}, {"cfg_scale": 1.0})
    # Guidance is for masked models, and Dream refuses this policy.
    if (not sampling or kind == "masked") and (model, cache) != ("dream-tiny", "dkv-greedy")
]
PREFIX, OWN, RESPONSE = 37, 6, 13


def work(llm: LLM, cache: str, requests: int = 3, **sampling: Any) -> list[Request]:
    more: dict[str, Any] = {"remasking": "random"} if cache == "dkv-greedy" else {}
    if llm.loaded.config.kind == "uniform":
        more["canvas_length"] = PREFIX + OWN + RESPONSE + 4
    params = flat_params(**{"max_tokens": RESPONSE, "ignore_eos": True, **more, **sampling})
    policy = llm.session.policy(cache, SETTINGS.get(cache))
    prompts = [[*range(PREFIX), *range(100 + i, 100 + i + OWN)] for i in range(requests)]
    return [Request(str(i), prompt, params, PREFIX, policy=policy) for i, prompt in enumerate(prompts)]


def model_of(name: str, **limits: Any) -> LLM:
    limits = {"max_num_seqs": 6, "max_model_len": 64, "store_budget_tokens": 400, **limits}
    return LLM(name, load_format="dummy", dtype="float32", engine=EngineConfig(**limits))


@pytest.mark.parametrize(("model", "cache", "sampling"), CASES, ids=str)
def test_what_is_measured_is_the_formula_and_unused_slots(model: str, cache: str, sampling: dict[str, Any]) -> None:
    llm = model_of(model)
    use = measure_memory(llm, cache, work(llm, cache, **sampling))
    assert use.measured - use.unused == use.formula.total > 0
    assert 0 < use.unused < use.measured / 3, "pages of 16 slots"
    assert use.share == use.measured / llm.loaded.weights.nbytes
    assert use.formula.total == sum(use.formula.parts.values())


@pytest.mark.parametrize("cache", ["none", "exact"])
def test_layers_of_different_shapes(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows over half of the layers' width, and signals beside K and V. Pages of one slot leave nothing unused."""
    tiny = preset("diffusion-gemma-tiny")
    assert tiny.sliding is not None
    config = replace(tiny, sliding=replace(tiny.sliding, kv_heads=1, head_dim=24))
    monkeypatch.setattr("remask.checkpoint.loaded.preset", lambda _: config)
    llm = model_of("diffusion-gemma-tiny", page_size=1)
    use = measure_memory(llm, cache, work(llm, cache))
    per_token = 4 * (2 * sum(shape.kv_heads * shape.head_dim for shape in map(config.shape_of, range(3))) + 64)
    assert per_token == 4 * (2 * (24 + 24 + 32) + 64)
    canvas = PREFIX + OWN + 2 * 8  # the prompt, and whole canvases
    tokens = 3 * canvas - (2 * PREFIX if cache == "exact" else 0)
    assert (use.unused, use.measured) == (0, use.formula.total)
    assert use.measured == per_token * tokens


def test_pages_of_one_slot_leave_nothing_unused() -> None:
    llm = model_of("llada-tiny", page_size=1)
    use = measure_memory(llm, "bicache", work(llm, "bicache"))
    assert (use.unused, use.measured) == (0, use.formula.total)


def test_requests_that_cannot_run_together_are_refused() -> None:
    llm = model_of("llada-tiny", max_num_seqs=2)
    with pytest.raises(ConfigError, match="never ran together"):
        measure_memory(llm, "none", work(llm, "none"))


def test_the_papers_formula_of_dllm_cache() -> None:
    """Section 3: T x d x 4 x L numbers, for as many K/V heads as query heads. LLaDA-8B, 1,024 tokens in bfloat16."""
    policy = parse("dllm-cache", None, lambda: DepthLookup({}))
    told = formula(preset("llada-8b"), 2, policy, Crowd(1, 1024), 16)
    assert told.total == told.kv + told.outputs == 2 * 1024 * 4096 * 4 * 32


def test_a_prefix_costs_its_memory_once() -> None:
    config, policy = preset("llada-8b"), parse("bicache", {"depth": 20}, lambda: DepthLookup({}))
    one, ten = (formula(config, 2, policy, Crowd(count, 1200, 1000), 16) for count in (1, 10))
    assert (one.store, one.boundary) == (ten.store, ten.boundary) == (2 * 2 * 4096 * 1000 * 32, 2 * 4096 * 1000 * 31)
    assert ten.kv == 10 * one.kv == 10 * 2 * 2 * 4096 * (1200 * 32 - 1000 * 21)
