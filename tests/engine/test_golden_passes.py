"""The one transformer on the recorded passes of GIDD, SDAR and mixtures: logits, hidden states, K, V and routing."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.engine.canvas_state import CanvasState, allocate_states, plain_table
from remask.engine.pack import Target, pack
from remask.errors import PlanError
from remask.model.invariant import batch_invariant
from remask.model.mixture import Routes
from remask.model.pool import Pool
from remask.model.transformer import Transformer
from remask.model.weights import MixtureWeights
from remask.plan.canvas import Canvas, Ledger
from remask.plan.plan import Plan, Reach
from remask.plan.spans import Span
from remask.store.pages import PageAllocator
from tests.engine.executors import EXECUTORS, Make
from tests.engine.support import CPU
from tests.goldens import a2d, block_causal, llada22, moe, sumi, uniform

TOLERANCE = 1e-4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@cache
def model_of(folder: Path, dtype: torch.dtype) -> Transformer:
    loaded = find_model(ModelSettings(str(folder))).load(dtype, CPU)
    return Transformer(loaded.config, loaded.weights)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=TOLERANCE)


class Passes:
    """A canvas in scattered pages of a pool full of NaN, and passes over it."""

    def __init__(self, model: Transformer, tokens: Tensor) -> None:
        self.model, self.length, layers = model, len(tokens), model.config.layers
        allocator = PageAllocator(layers, self.length, 3)
        odd = [allocator.allocate(3, range(layers)) for _ in range(self.length)]
        for extent in odd[::2]:
            assert extent is not None
            allocator.release(extent)
        own = allocator.allocate(self.length, range(layers))
        assert own is not None
        self.pool = Pool(model.config, self.length, 3, model.dtype, CPU)
        for tensor in (*self.pool.k, *self.pool.v):
            tensor.fill_(torch.nan)
        self.branch = CanvasState(
            canvas=Canvas((), tokens.tolist(), self.length),
            ledger=Ledger(layers, self.length, None),
            tables=(plain_table(own),),
            states=allocate_states(layers, model.config.hidden, model.dtype, CPU, self.length).fill_(torch.nan),
        )
        self.slots = torch.from_numpy(own.slots())

    def run(self, start: int, stop: int, sees: Reach | None) -> Tensor:
        """Normed states of rows start .. stop - 1. States between layers are kept."""
        rows = (np.arange(self.length) >= start) & (np.arange(self.length) < stop)
        layers = range(self.model.config.layers)
        spans = tuple(Span(range(layer, layer + 1), rows, save=rows if layer else None) for layer in layers)
        plan = Plan(spans, predict=rows, sees=sees)
        self.branch.enter(plan)
        return self.model.forward(pack([(self.branch, plan)], Target(CPU)), self.pool)

    def kv(self) -> tuple[Tensor, Tensor]:
        """[layers, T, heads, Dh] each."""
        k, v = (torch.stack([layer[self.slots] for layer in part]) for part in (self.pool.k, self.pool.v))
        return k, v


def in_blocks(length: int, block: int) -> Reach:
    return np.minimum((np.arange(length) // block + 1) * block, length)


def check_states(passes: Passes, out: Tensor, recorded: Mapping[str, Tensor], case: str) -> None:
    """Hidden states, K and V, where they were recorded."""
    if f"{case}.hidden_states" in recorded:
        assert passes.branch.states is not None
        close(passes.branch.states, recorded[f"{case}.hidden_states"][1:-1])
        close(out, recorded[f"{case}.hidden_states"][-1])
    if f"{case}.k_cache" in recorded:
        for actual, part in zip(passes.kv(), "kv", strict=True):
            close(actual, recorded[f"{case}.{part}_cache"].transpose(1, 2))


def clean_then_noise(clean: int, length: int) -> Reach:
    return np.where(np.arange(length) < clean, clean, length)


@DTYPES
@pytest.mark.parametrize("name", uniform.MODELS)
def test_gidd(name: str, dtype: torch.dtype) -> None:
    model, recorded = model_of(uniform.model_dir(name), dtype), uniform.forward(name)
    compared = 0
    for row, tokens in enumerate(recorded["ids"]):
        noise = recorded["structured.noise_mask"][row].bool()
        clean = int((~noise).sum())
        assert not noise[:clean].any(), "the clean rows stand first"
        passes = Passes(model, tokens)
        out = passes.run(0, len(tokens), clean_then_noise(clean, len(tokens)))
        close(model.head(out), recorded["structured.logits"][row])
        if "structured.hidden_states" in recorded:
            states = recorded["structured.hidden_states"][:, row]
            assert passes.branch.states is not None
            close(passes.branch.states, states[1:-1])
            close(out, states[-1])
        if "plain.logits" in recorded:
            close(model.head(Passes(model, tokens).run(0, len(tokens), None)), recorded["plain.logits"][row])
        compared += 1
    assert compared == 2


@pytest.mark.few(3)
@pytest.mark.parametrize("make", EXECUTORS)
def test_every_executor_on_a_clean_prompt_and_noise(make: Make) -> None:
    """Scores are capped, every row sees the sink, and clean rows do not see noise."""
    name = uniform.MODELS[0]
    recorded, plain = uniform.forward(name), model_of(uniform.model_dir(name), torch.float32)
    model = plain.with_attention(make(plain.config.score_cap))
    tokens, clean = recorded["ids"][0], int((~recorded["structured.noise_mask"][0].bool()).sum())
    out = Passes(model, tokens).run(0, len(tokens), clean_then_noise(clean, len(tokens)))
    close(model.head(out), recorded["structured.logits"][0])


@DTYPES
@pytest.mark.parametrize("name", [name for name in uniform.MODELS if "cached.past_k" in uniform.forward(name)])
def test_gidd_with_clean_rows_cached(name: str, dtype: torch.dtype) -> None:
    model, recorded = model_of(uniform.model_dir(name), dtype), uniform.forward(name)
    sinks = int(model.config.sink is not None)
    for row, tokens in enumerate(recorded["ids"]):
        past_k, past_v = (recorded[f"cached.past_{part}"][:, row] for part in "kv")
        clean, length = past_k.shape[1] - sinks, len(tokens)
        sees, passes = clean_then_noise(past_k.shape[1] - sinks, len(tokens)), Passes(model, tokens)
        passes.run(0, clean, sees)
        k, v = passes.kv()
        close(k[:, :clean], past_k[:, sinks:])
        close(v[:, :clean], past_v[:, sinks:])
        close(model.head(passes.run(clean, length, sees)), recorded["cached.suffix_logits"][row])
        for layer, weights in enumerate(model.weights.layers):
            if sinks:
                assert weights.sink_k is not None
                assert weights.sink_v is not None
                close(weights.sink_k, past_k[layer, 0])
                close(weights.sink_v, past_v[layer, 0])


SDAR = [
    (name, key.removesuffix(".input_ids"))
    for name in block_causal.MODELS
    for key in sorted(block_causal.logits(name))
    if key.endswith(".input_ids")
]


def at_once(passes: Passes, sees: Reach, block: int) -> Tensor:
    return passes.run(0, passes.length, sees)


def by_blocks(passes: Passes, sees: Reach, block: int) -> Tensor:
    """Two blocks at a time, so that a pass has rows of several and reads the K/V of earlier passes."""
    starts = range(0, passes.length, 2 * block)
    return torch.cat([passes.run(start, min(start + 2 * block, passes.length), sees) for start in starts])


@DTYPES
@pytest.mark.parametrize("how", [at_once, by_blocks])
@pytest.mark.parametrize(("name", "case"), SDAR, ids=str)
def test_sdar(name: str, case: str, how: Callable[[Passes, Reach, int], Tensor], dtype: torch.dtype) -> None:
    model, recorded = model_of(block_causal.model_dir(name), dtype), block_causal.logits(name)
    tokens, block = recorded[f"{case}.input_ids"], model.config.block_length
    assert block is not None
    passes = Passes(model, tokens)
    sees = in_blocks(len(tokens), block)
    out = how(passes, sees, block)
    close(model.head(out), recorded[f"{case}.logits"])
    check_states(passes, out, recorded, case)


@pytest.mark.parametrize("make", EXECUTORS)
def test_every_executor_on_blocks_of_scattered_pages(make: Make) -> None:
    name, case = SDAR[0]
    plain, recorded = model_of(block_causal.model_dir(name), torch.float32), block_causal.logits(name)
    model, tokens = plain.with_attention(make(plain.config.score_cap)), recorded[f"{case}.input_ids"]
    block = model.config.block_length
    assert block is not None
    out = by_blocks(Passes(model, tokens), in_blocks(len(tokens), block), block)
    close(model.head(out), recorded[f"{case}.logits"])


MIXTURES = [
    (name, key.removesuffix(".input_ids"))
    for name in moe.MODELS
    for key in sorted(moe.logits(name))
    if key.endswith(".input_ids")
]


class Routing(Transformer):
    """Remembers how rows were routed, a layer with experts after the other."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model.config, model.weights, model.attention, model.arithmetic)
        self.routes: list[Routes] = []

    def route(self, x: Tensor, w: MixtureWeights) -> Routes:
        self.routes.append(super().route(x, w))
        return self.routes[-1]


@DTYPES
@pytest.mark.parametrize("tiled", [False, True], ids=["plain", "batch invariant"])
@pytest.mark.parametrize(("name", "case"), MIXTURES, ids=str)
def test_mixtures_of_experts(name: str, case: str, tiled: bool, dtype: torch.dtype) -> None:
    plain, recorded = model_of(moe.model_dir(name), dtype), moe.logits(name)
    model = Routing(batch_invariant(plain) if tiled else plain)
    tokens = recorded[f"{case}.input_ids"].flatten()
    causal = in_blocks(len(tokens), 8)  # as recorded
    passes = Passes(model, tokens)
    out = passes.run(0, len(tokens), None if name == moe.MASKED else causal)
    close(model.head(out), recorded[f"{case}.logits"].view(len(tokens), -1))
    experts, weights = recorded[f"{case}.router_experts"], recorded[f"{case}.router_weights"]
    assert len(model.routes) == len(experts)
    for routes, chosen, expected in zip(model.routes, experts, weights, strict=True):
        order = routes.experts.argsort(dim=-1)
        assert torch.equal(routes.experts.gather(1, order), chosen)
        close(routes.weights.gather(1, order), expected)
    check_states(passes, out, recorded, case)


@pytest.mark.parametrize("how", [at_once, by_blocks])
@pytest.mark.parametrize("name", llada22.MODELS)
def test_pools_of_experts(name: str, how: Callable[[Passes, Reach, int], Tensor]) -> None:
    """Of LLaDA2.2: groups of experts stand in its configuration, and have no effect."""
    recorded, model = llada22.logits(name), Routing(model_of(llada22.folder(name), torch.float32))
    tokens, block, rows = torch.tensor(recorded["input_ids"]), recorded["block_length"], recorded["rows"]
    logits = model.head(how(Passes(model, tokens), in_blocks(len(tokens), block), block))
    close(logits[rows], torch.tensor(recorded["logits"]))
    layers, passes = len(recorded["experts"]), len(model.routes) // len(recorded["experts"])
    for layer in range(layers):
        found = [model.routes[number * layers + layer] for number in range(passes)]
        experts, weights = (
            torch.cat([getattr(each, field) for each in found])[rows] for field in ("experts", "weights")
        )
        order = experts.argsort(dim=-1)
        assert experts.gather(1, order).tolist() == recorded["experts"][layer]
        close(weights.gather(1, order), torch.tensor(recorded["weights"][layer]))


def test_a_pass_over_a_part_of_a_routing_block_is_refused() -> None:
    model = model_of(llada22.folder("calm"), torch.float32)
    passes = Passes(model, torch.zeros(16, dtype=torch.int64))
    passes.branch.routing_block = model.config.routing_block
    for start, stop in ((0, 4), (4, 16), (4, 12)):
        with pytest.raises(PlanError, match="experts in blocks of 8"):
            passes.run(start, stop, in_blocks(16, 8))


@pytest.mark.few(4)
@pytest.mark.parametrize("make", EXECUTORS)
@pytest.mark.parametrize("name", sumi.MODELS)
def test_a_sink_of_zeros(name: str, make: Make) -> None:
    """Of Sumi, on every executor."""
    recorded, plain = sumi.logits(name), model_of(sumi.folder(name), torch.float32)
    model, length = plain.with_attention(make(plain.config.score_cap)), len(recorded["input_ids"])
    states = Passes(model, torch.tensor(recorded["input_ids"])).run(0, length, None)
    close(model.head(states)[recorded["rows"]], torch.tensor(recorded["logits"]))


@pytest.mark.parametrize("name", [name for name in a2d.MODELS if name != "modernbert"])
def test_logits_of_a2d_and_stable_diffcoder(name: str) -> None:
    recorded, model = a2d.logits(name), model_of(a2d.model_dir(name), torch.float32)
    length, block = len(recorded["input_ids"]), recorded.get("block_size")
    assert (model.config.kind, model.config.block_length) == ("block_causal" if block else "masked", block)
    sees = None if block is None else in_blocks(length, block)
    states = Passes(model, torch.tensor(recorded["input_ids"])).run(0, length, sees)
    close(model.head(states)[recorded["rows"]], torch.tensor(recorded["logits"]))
