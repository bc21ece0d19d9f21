"""Engines for tests: small models in float64, memory full of NaN until written, and loops that must end."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from remask.checkpoint.loaded import dummy_weights
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.families import preset
from remask.model.config import ModelConfig
from remask.model.pool import Pool
from remask.model.stage import Stage, StepBatch
from remask.model.transformer import Transformer
from remask.model.weights import LowRank, Weights
from remask.policies import BiCache, CachePolicy, Dense, Reuse, parse
from remask.policies.bicache import DepthLookup
from remask.policies.block import BlockDual, BlockPrefix
from remask.policies.dkv import DkvDecode, DkvGreedy, DkvPd, DkvPrefill
from remask.policies.dllm import SELECTS, DllmCache
from remask.request.result import Event, Result, Usage
from remask.store.pages import Extent
from tests.device import graphs, overlap
from tests.engine.own_policies import Measuring, Reviving
from tests.sampling_fields import flat_params

T = TypeVar("T")
D = TypeVar("D")
CPU = torch.device("cpu")
LAYERS = 4
VOCAB = 64
MASK_ID = VOCAB - 1
EOS = 5
DEADLINE = 1e6  # seconds; only `let_pass` makes them go by


def small_config(family: str) -> ModelConfig:
    """The tiny preset with four layers, narrower, so that a pass takes a millisecond."""
    base = preset(f"{family}-tiny")
    kv_heads = 2 if base.kv_heads < base.heads else 4
    mixture = base.mixture and replace(base.mixture, intermediate=12, dense_layers=(0,))
    return replace(
        base,
        layers=LAYERS,
        hidden=32,
        heads=4,
        kv_heads=kv_heads,
        head_dim=8,
        intermediate=48,
        mixture=mixture,
        vocab=VOCAB,
        mask_id=MASK_ID if base.mask_id >= 0 else base.mask_id,
        max_length=128,
        stop_ids=(EOS,),
    )


def lively_weights(
    config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0, device: torch.device = CPU
) -> Weights:
    """Dummy weights, scaled so that attention and logits are far from uniform."""
    weights = dummy_weights(config, dtype, device, seed)
    for tensor in {id(t): t for t in weights.tensors() if t.dim() > 1 and t.numel()}.values():
        tensor.mul_(50 * 1.4 / tensor.shape[-1] ** 0.5)
    weights.embed.mul_(4)
    return weights


def lively_adapters(weights: Weights, names: Sequence[str], seed: int = 0) -> Weights:
    """`weights` with random adapters beside all of their dense matrices, which change what is computed by a third."""
    generator = torch.Generator().manual_seed(seed)

    def change(matrix: Tensor) -> LowRank:
        down, up = (
            torch.randn(3, matrix.shape[1], generator=generator, device=CPU),
            torch.randn(len(matrix), 3, generator=generator, device=CPU),
        )
        scale = 0.3 * float(matrix.std()) / 3**0.5
        return LowRank(down.to(matrix), up.to(matrix) * scale)

    layers = []
    for layer in weights.layers:
        fields = [name for name in ("qkv", "out", "gate_up", "down") if getattr(layer, name).numel()]
        changes = {field: {name: change(getattr(layer, field)) for name in names} for field in fields}
        layers.append(replace(layer, low_rank=changes))
    return replace(weights, layers=tuple(layers))


class CheckedTransformer(Transformer):
    """Refuses a pass that read what nobody wrote: the memory around is full of NaN."""

    passes = 0
    last: StepBatch | None = None

    def forward(self, batch: StepBatch, pool: Pool) -> Tensor:
        self.last = batch
        return super().forward(batch, pool)

    def run(self, stage: Stage, h: Tensor, pool: Pool) -> Tensor:
        """As ever, and then no NaN may have been written."""
        h = super().run(stage, h, pool)
        for layer in stage.layers:
            assert pool.k[layer][stage.slots].isfinite().all(), f"NaN written to K of layer {layer}"
            assert pool.v[layer][stage.slots].isfinite().all(), f"NaN written to V of layer {layer}"
            if stage.outputs:
                kept = [output[stage.slots] for output in pool.outputs[layer]]
                assert all(output.isfinite().all() for output in kept), f"NaN kept as an output of layer {layer}"
        for save in stage.save:
            assert save.states[save.positions].isfinite().all(), "NaN kept as a hidden state"
        return h

    def head_input(self, h: Tensor) -> Tensor:
        """As ever, and then no NaN may have come out."""
        self.passes += 1
        out = super().head_input(h)
        assert out.isfinite().all(), "a predicted row is NaN"
        return out

    def queries(self, h: Tensor, layer: int, *more: Any) -> Tensor:
        """As ever, of states that are there."""
        assert h.isfinite().all(), f"attention of layer {layer} is looked at of a row without a state"
        return super().queries(h, layer, *more)


FAMILIES = ("llada", "dream", "llada-moe")
MODELS = {family: CheckedTransformer(small_config(family), lively_weights(small_config(family))) for family in FAMILIES}


def make_engine(family: str = "llada", decode: Callable[[Sequence[int]], str] | None = None, **limits: Any) -> Engine:
    """An engine whose pages and boundary states are NaN whenever nobody owns them."""
    return poisoned_engine(MODELS[family], decode, **limits)


def poisoned_engine(model: Transformer, decode: Callable[[Sequence[int]], str] | None = None, **limits: Any) -> Engine:
    """The same of any model: K, V, outputs and boundary states are NaN until they are written, and once freed."""
    defaults: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "page_size": 4, "store_budget_tokens": 64}
    if not limits.get("batch_invariant"):
        defaults |= {"overlap": overlap(), "graphs": graphs() and model.config.mixture is None}
    engine = Engine(model, EngineConfig(**{**defaults, **limits}), "test", decode)
    pool, allocator = engine.pool, engine.allocator
    for tensor in (*pool.k, *pool.v, *(() if pool.signals is None else (pool.signals[:-1],))):
        tensor.fill_(torch.nan)
    free, states, keep = allocator.release, engine.memory.new_states, pool.allocate_outputs

    def release(extent: Extent) -> None:
        free(extent)
        token_buffer = engine.runner.token_buffer
        for layer in extent.layers:
            unowned = extent.pages[allocator.references[layer, extent.pages] == 0]
            slots = (unowned[:, None] * allocator.page_size + np.arange(allocator.page_size)).ravel()
            for tensor in (pool.k[layer], pool.v[layer], *(pool.outputs[layer] if pool.outputs else ())):
                tensor[torch.from_numpy(slots)] = torch.nan
            if layer == 0 and pool.signals is not None:
                pool.signals[torch.from_numpy(slots)] = torch.nan
            if layer == 0 and token_buffer is not None:
                token_buffer.values[torch.from_numpy(slots)] = -2  # no token

    def allocate_outputs() -> None:
        if not pool.outputs:
            keep()
            for tensor in (tensor for pair in pool.outputs for tensor in pair):
                tensor.fill_(torch.nan)

    vars(allocator)["release"] = release
    vars(pool)["allocate_outputs"] = allocate_outputs
    vars(engine.memory)["new_states"] = engine.store.new_states = lambda tokens: states(tokens).fill_(torch.nan)
    return engine


@dataclass(frozen=True)
class Work:
    """A request, its policy, and the step at which it joins."""

    request: Request
    policy: CachePolicy
    joins: int = 0

    @property
    def asked(self) -> Request:
        return self.request.with_policy(self.policy)


def policy_of(name: str, **settings: Any) -> CachePolicy:
    """The policy of this name, beside an empty depth table."""
    return parse(name, settings, lambda: DepthLookup({}))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids; the mask token may be among them, as users may type it."""
    return [random.Random(f"{length} {seed} {i}").randrange(VOCAB) for i in range(length)]


def request(
    name: str = "r", prompt: Sequence[int] | int = 8, prefix: int = 0, ignore_eos: bool = True, **sampling: Any
) -> Request:
    """A request of 8 tokens that takes no notice of EOS, unless told otherwise."""
    tokens = prompt_of(prompt) if isinstance(prompt, int) else list(prompt)
    params = flat_params(**{"max_tokens": 8, "ignore_eos": ignore_eos, **sampling})
    return Request(name, tokens, params, prefix)


def running_canvases(engine: Engine) -> int:
    """Canvases of requests that have begun, those between two blocks of a growing canvas included."""
    lifecycle = engine._lifecycle
    return sum(len(running.canvases) for running in [*lifecycle.requests(), *lifecycle.growing.values()])


def run(
    engine: Engine, work: Sequence[Work], limit: int = 2000, each_step: Callable[[int], None] | None = None
) -> dict[str, Result]:
    """Run to the end; what joins later is added between steps. Ends idle, which the engine checks for leaks."""
    results: dict[str, Result] = {}
    todo = sorted(work, key=lambda item: item.joins)
    step = 0
    while todo or engine.busy:
        while todo and todo[0].joins <= step:
            item = todo.pop(0)
            engine.add(item.asked)
        if each_step is not None:
            each_step(step)
        for event in engine.step():
            if event.result is not None:
                assert event.id not in results
                results[event.id] = event.result
        step += 1
        assert step < limit, f"stuck with {engine.waiting} waiting and {running_canvases(engine)} running"
    engine.check_integrity()
    return results


def served(engine: Engine, *work: Work) -> list[Result]:
    """Results of requests that come one after the other."""
    return [run(engine, [item])[item.request.id] for item in work]


def events_of(engine: Engine, *asked: Request) -> list[Event]:
    """All events of these requests, and of those that run already."""
    for each in asked:
        engine.add(each)
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    return events


def first_clear(draw: Callable[[], T], decode: Callable[[T], D | None]) -> tuple[T, D]:
    """What is drawn, and what an oracle decodes it to, which is None where that turns on a rounding."""
    for _ in range(60):
        line = draw()
        expected = decode(line)
        if expected is not None:
            return line, expected
    raise AssertionError("every decode turns on a rounding")


def alone(item: Work, family: str = "llada", **limits: Any) -> Result:
    return run(make_engine(family, **limits), [replace(item, joins=0)])[item.request.id]


def written(result: Result) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [(each.step, each.positions, each.token_ids) for each in result.trace]


def work_of(usage: Usage) -> dict[str, Any]:
    """Usage without what depends on who came first."""
    names = ("prompt_tokens", "completion_tokens", "steps", "forwards", "row_layers")
    return {name: getattr(usage, name) for name in (*names, "prefix_depth", "prefix_tokens")}


def outcome(result: Result) -> tuple[Any, ...]:
    """All that must not depend on company."""
    return (result.token_ids, result.finish_reason, result.trace, work_of(result.usage), result.error)


def as_if_asked_for(item: Work, result: Result) -> Work:
    """The same request asking for exactly the shared prefix that it read."""
    cached = result.usage.cached_tokens
    return item if not cached else replace(item, request=replace(item.request, prefix_length=cached))


def let_pass(engine: Engine, name: str, seconds: float) -> None:
    """As if a request had arrived so much earlier."""
    unfinished = [*engine._lifecycle.waiting, *(running.pending for running in engine._lifecycle.unfinished())]
    (pending,) = [each for each in unfinished if each.request.id == name]
    pending.arrived -= seconds


def inner_policies(rng: random.Random, family: str) -> dict[str, CachePolicy]:
    """One policy of each kind that caches within a request, with any settings; `dkv-greedy` only fits some samplers."""
    interval, dream = rng.choice([None, 1, 2, 3, 16]), family == "dream"
    shifts: tuple[Literal["un", "un_right"] | None, ...] = (None, "un", "un_right") if dream else (None,)
    fills: tuple[Literal["transfer", "separate"], ...] = ("transfer",) if dream else ("transfer", "separate")
    cached = DllmCache(
        rng.choice([1, 3, 100]),
        rng.choice([1, 2, 4]),
        rng.choice([0.0, 0.3, 1.0]),
        rng.choice([1, 2, 3]),
        rng.choice(SELECTS),
        rng.choice([1, 1, 2, 3]),
    )
    policies: dict[str, CachePolicy] = {
        "none": Dense(),
        "block-prefix": BlockPrefix(),
        "block-dual": BlockDual(rng.choice(fills)),
        "dkv-decode": DkvDecode(interval, rng.choice(shifts)),
        "dkv-prefill": DkvPrefill(),
        "dkv-pd": DkvPd(interval, rng.choice(shifts)),
        "dllm-cache": cached,
        "measuring": Measuring(rng.choice([0.0, 0.1, 1.0])),
    }
    return policies if dream else policies | {"dkv-greedy": DkvGreedy(interval, rng.randint(0, 4))}


def random_policy(rng: random.Random, family: str, ordered: bool) -> CachePolicy:
    """Any policy with any settings that a sampler fits which knows its positions beforehand (`ordered`) or not."""
    states: tuple[Literal["stored", "recomputed"], ...] = ("stored", "recomputed")
    inner = inner_policies(rng, family)
    if not ordered:
        inner.pop("dkv-greedy", None)
    reviving = Reviving(rng.randint(1, LAYERS - 1), rng.choice([1, 2, 3]))
    interval = rng.choice([None, 1, 2, 3, 16])
    over = BiCache(rng.choice([Dense(), *inner.values()]), rng.randint(0, LAYERS), interval, rng.choice(states))
    policies: list[CachePolicy] = [Reuse(), over, over, over, reviving, *inner.values()]
    return rng.choice(policies)


SAMPLING: tuple[Mapping[str, Any], ...] = (
    {},
    {"block_length": 4},
    {"block_length": 2, "steps": 8},
    {"steps": 3},
    {"steps": 16},
    {"remasking": "random"},
    {"remasking": "random", "block_length": 4, "steps": 4},
    {"remasking": "entropy", "eps": 0.01},
    {"remasking": "topk_margin"},
    {"remasking": "maskgit_plus", "top_p": 0.9, "temperature": 0.8},
    {"remasking": "origin"},
    {"threshold": 0.3, "block_length": 4},
    {"factor": 0.9},
    {"remasking": "confidence_threshold", "threshold": 0.4, "steps": 4},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5},
    {"cfg_scale": 1.5},
    {"cfg_scale": 0.5, "temperature": 0.7, "block_length": 4},
    {"ignore_eos": False},
    {"stop_token_ids": [1, 2, 3, 4, 6, 7, 8, 9]},
)  # fmt: skip


def random_work(rng: random.Random, family: str, name: str) -> Work:
    """Any request under any policy; its prefix is one of few, so that some are shared."""
    length = rng.choice([3, 6, 9, 14])
    prompt = prompt_of(length, seed=rng.randrange(2)) + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
    sampling = {"max_tokens": 8, "ignore_eos": True, **rng.choice(SAMPLING), "seed": rng.randrange(1000)}
    prefix = rng.choice([0, length, length, length, min(length + 1, len(prompt))])
    policy = random_policy(rng, family, sampling.get("remasking") == "random")
    return Work(Request(name, prompt, flat_params(**sampling), prefix), policy, rng.randrange(12))


def nested_work(rng: random.Random, family: str, name: str) -> Work:
    """The same with a shared prefix out of one of two conversations, so that prefixes nest; of two tenants."""
    item = random_work(rng, family, name)
    length = rng.randint(1, 16)
    prompt = prompt_of(16, seed=rng.randrange(2))[:length] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
    asked = replace(
        item.request,
        prompt_token_ids=prompt,
        prefix_length=rng.choice([0, length, length, length]),
        cache_salt=rng.choice(["", "", "", "tenant"]),
        priority=rng.choice([0, 0, 0, -1, 1]),
        deadline_s=rng.choice([None, None, DEADLINE]),
    )
    return replace(item, request=asked)
