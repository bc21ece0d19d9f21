"""FLOPs from plans against FLOPs that PyTorch counts, over whole requests of every policy on every kind of model."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from lab.tests import installed

from remask import SamplingParams
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.policies import CachePolicy, names_for, parse
from remask.policies.bicache import DepthLookup
from remask_lab.ops.flops import Executed, PairCount, flop_counter
from tests.engine import kinds
from tests.engine.support import (
    MODELS,
    CheckedTransformer,
    Work,
    lively_weights,
    poisoned_engine,
    random_work,
    request,
    run,
    small_config,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "bicache": {"depth": 2, "refresh_interval": 3},
    **installed.SETTINGS,
    "dllm-cache": {"prompt_interval": 5, "response_interval": 3, "ratio": 0.4},
    "dkv-decode": {"refresh_interval": 3},
    "dkv-greedy": {"refresh_interval": 3, "window": 2},
}
MASKED: list[tuple[str, dict[str, Any]]] = [(name, SETTINGS.get(name, {})) for name in names_for("masked")] + [
    ("bicache", {"depth": 2, "refresh_interval": 2, "boundary": "recomputed"}),
    ("bicache", {"depth": 4}),
    ("bicache+block-dual", {"depth": 2}),
    ("bicache+dkv-decode", {"depth": 3}),
    ("bicache+dllm-cache", {"depth": 2, "response_interval": 3, "ratio": 0.4}),
    ("bicache+dllm-cache", {"depth": 2, "response_interval": 3, "ratio": 0.4, "select_layers": 3}),
    ("block-dual", {"fill_pass": "separate"}),
    ("dllm-cache", {"response_interval": 4, "ratio": 0.5, "select_layers": 2}),
    ("dllm-cache", {"response_interval": 4, "ratio": 0.0}),
    ("dllm-cache", {"response_interval": 4, "ratio": 0.5, "select": "key"}),
    ("dllm-cache", {"response_interval": 4, "ratio": 0.5, "select": "random", "cfg_interval": 3}),
]
ACCEPTED = [  # Dream's canvas shifts its rows by one, which two methods do not support
    (family, name, settings)
    for family in ("llada", "dream", "llada-moe")
    for name, settings in MASKED
    if family != "dream" or (name != "dkv-greedy" and settings.get("fill_pass") != "separate")
]

UNIFORM: list[tuple[str, dict[str, Any]]] = [("none", {}), ("block-prefix", {}), ("uniform-cache", {"refresh_next": 2})]
UNIFORM += [("uniform-cache", {"refresh_next": 2, "drift": 0.05})]
CAUSAL: list[tuple[str, dict[str, Any]]] = [("none", {}), ("exact", {"prefill_chunk": 8}), ("exact", {})]
FAST_DLLM = small_config("fast-dllm-v2")
REPEATING = "dllm-cache"  # what is compared is projected twice


def policy(name: str, settings: dict[str, Any]) -> CachePolicy:
    return parse(name, settings, lambda: DepthLookup({}))


def measured(engine: Engine, work: Sequence[Work]) -> Executed:
    """Costs of all passes; what they say was run is what PyTorch counts."""
    executed = Executed(engine)
    with flop_counter() as counter:
        run(engine, work)
    assert executed.meter.passes == engine.stats.steps
    assert executed.flops == counter.get_total_flops() > 0
    return executed


@pytest.mark.few(41)
@pytest.mark.parametrize("sampling", [{"block_length": 4}, {"cfg_scale": 1.5}], ids=["blocks", "guided"])
@pytest.mark.parametrize(("family", "name", "settings"), ACCEPTED, ids=str)
def test_masked_models(family: str, sampling: dict[str, Any], name: str, settings: dict[str, Any]) -> None:
    more: dict[str, Any] = {"remasking": "random"} if name == "dkv-greedy" else {}
    item = Work(request("r", 12, 8, **sampling, **more), policy(name, settings))
    executed = measured(poisoned_engine(MODELS[family]), [item])
    cost = executed.meter.total
    assert cost.total.flops + cost.repeated == executed.flops, "one canvas is not padded"
    assert cost.total.flops >= 0.96 * executed.flops
    assert not cost.repeated or name.endswith(REPEATING)


@pytest.mark.few(5)
@pytest.mark.parametrize("model", kinds.UNIFORM)
@pytest.mark.parametrize(("name", "settings"), UNIFORM, ids=str)
def test_uniform_models(model: str, name: str, settings: dict[str, Any]) -> None:
    """Clean rows see less than noise, and few rows are masked together; the sink is a key more.

    In a model without the mask every row sees all of the canvas.
    """
    transformer = kinds.checkpoint(model).model
    engine = poisoned_engine(transformer, max_model_len=48)
    more: dict[str, Any] = {"block_length": 4, "steps_per_block": 4, "canvas_length": 30}
    executed = measured(engine, [Work(request("r", kinds.tokens(random.Random(0), 9), **more), policy(name, settings))])
    cost = executed.meter.total
    padding = executed.flops - cost.total.flops
    assert cost.repeated == 0
    if transformer.config.structured_attention:
        assert 0 < padding < 2 * cost.operations["attention"].flops, "clean rows are masked, not left out"
    else:
        assert padding == 0


@pytest.mark.few(5)
@pytest.mark.parametrize("model", [*kinds.BLOCKS, "fast-dllm-v2"])
@pytest.mark.parametrize(("name", "settings"), CAUSAL, ids=str)
def test_block_causal_models(model: str, name: str, settings: dict[str, Any]) -> None:
    """One answer, and one that finds its pages stored."""
    fast = model == "fast-dllm-v2"
    transformer = CheckedTransformer(FAST_DLLM, lively_weights(FAST_DLLM)) if fast else kinds.checkpoint(model).model
    block = transformer.config.block_length or 4
    engine = poisoned_engine(transformer, page_size=2 * block, max_model_len=48)
    prompt = kinds.tokens(random.Random(0), 4 * block)
    more: dict[str, Any] = {"block_length": block, "steps_per_block": 2}
    work = [Work(request(f"r{i}", prompt, **more), policy(name, settings), joins=60 * i) for i in range(2)]
    executed = measured(engine, work)
    cost = executed.meter.total
    assert 0 <= executed.flops - cost.total.flops < 2 * cost.operations["attention"].flops
    assert cost.repeated == 0, "the opening pass of a prompt whose pages are all stored projects no K and V there"


@pytest.mark.parametrize("name", ["none", "exact"])
def test_layers_of_different_shapes(name: str) -> None:
    """DiffusionGemma: heads by layer, values that are keys, and rows that take in what was predicted of them.

    The second request finds the first one's prompt stored.
    """
    config = small_config("diffusion-gemma")
    assert len({(shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim) for shape in config.shapes}) == 2
    engine = poisoned_engine(CheckedTransformer(config, lively_weights(config)), max_model_len=96)
    prompt = kinds.tokens(random.Random(0), 21)
    more: dict[str, Any] = {"steps_per_block": 3, "max_tokens": 13, "renoising": {"entropy_bound": 3.0}}
    work = [
        Work(Request(f"r{i}", prompt, SamplingParams.from_mapping(more | {"seed": i})), policy(name, {}), joins=40 * i)
        for i in range(2)
    ]
    executed = measured(engine, work)
    cost = executed.meter.total
    assert cost.operations["attention"].flops <= executed.pairs.flops
    assert cost.repeated == 0


@pytest.mark.few(23)
@pytest.mark.parametrize("family", ["llada", "dream", "llada-moe"])
@pytest.mark.parametrize("limits", [{}, {"max_row_layers": 60}], ids=["at once", "in pieces"])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches(family: str, limits: dict[str, Any], seed: int) -> None:
    """Canvases of different lengths under different policies, some of which read one prefix together."""
    rng = random.Random(f"{family} {seed}")
    work = [random_work(rng, family, f"r{i}") for i in range(8)]
    executed = measured(poisoned_engine(MODELS[family], **limits), work)
    cost = executed.meter.total
    assert cost.total.flops + cost.repeated <= executed.flops


def test_watching_costs_nothing_else() -> None:
    """The same tokens, and the engine's own model as it was."""
    item = Work(request("r", 12, 8), policy("bicache+block-dual", {"depth": 2}))
    engine = poisoned_engine(MODELS["llada"])
    Executed(engine)
    watched, plain = run(engine, [item])["r"], run(poisoned_engine(MODELS["llada"]), [item])["r"]
    assert (watched.token_ids, watched.usage) == (plain.token_ids, plain.usage)
    assert not isinstance(MODELS["llada"].attention, PairCount)
