"""Adapters beside the weights: the logits of models into which PEFT has merged them, alone and in mixed batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.checks import Quantization
from remask.engine.canvas_state import CanvasState, plain_table
from remask.engine.pack import Target, pack
from remask.engine.request import Request
from remask.errors import UnknownNameError
from remask.model.pool import Pool
from remask.model.stage import AdapterRows
from remask.plan.canvas import Canvas, Ledger
from remask.plan.plan import Plan
from remask.plan.spans import Span
from remask.policies import parse
from remask.policies.bicache import DepthLookup
from remask.readers.logprobs import Logprobs
from remask.request.result import Result
from remask.request.sampling_params import SamplingParams
from remask.store.pages import Extent
from tests.checkpoint import checkpoints
from tests.checkpoint.adapters import adapted
from tests.engine.support import CPU, CheckedTransformer, Work, poisoned_engine, run, served
from tests.leftovers import lasting_folder
from tests.oracles import dense, gidd, sdar

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RAW: dict[str, dict[str, Any]] = {
    "llada": checkpoints.LLADA | {"hidden_size": 32},
    "dream": checkpoints.DREAM,
    "sdar": checkpoints.SDAR,
    "gidd": checkpoints.GIDD | {"mask_token_id": 39, "eos_token_id": 38, "weight_scaling": "fan_in"},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"r": 2, "use_rslora": True, "rank_pattern": {"v_proj": 5}},
    "two": {"r": 4, "lora_alpha": 16, "layers_to_transform": [1]},
}
NAMES = (None, *ADAPTERS)
VOCAB, PROMPT = 38, tuple(range(3, 15))


@dataclass(frozen=True)
class Family:
    """A base with its adapters beside it, and the folder of each model into which PEFT has merged one."""

    model: CheckedTransformer
    folders: dict[str | None, Path]


@cache
def family(name: str, dtype: torch.dtype = torch.float64, kind: Quantization | None = None) -> Family:
    raw, folder = RAW[name], lasting_folder()
    wide = raw | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96} if kind else raw
    tensors = checkpoints.random_tensors(wide)
    base: Path = checkpoints.write(folder / "base", wide, tensors)
    folders: dict[str | None, Path] = {None: base}
    targets = ["q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj"] if name == "llada" else TARGETS
    targets = [each for each in targets if name != "gidd" or each != "gate_proj"]
    for seed, (own, settings) in enumerate(ADAPTERS.items()):
        merged = adapted(folder / own, tensors, seed, target_modules=targets, **settings)
        folders[own] = checkpoints.write(folder / f"{own} merged", wide, merged)
    found = find_model(ModelSettings(str(base), adapters={own: str(folder / own) for own in ADAPTERS}))
    loaded = found.load(dtype, CPU, quantization=kind)
    return Family(CheckedTransformer(loaded.config, loaded.weights), folders)


@cache
def merged_model(name: str, adapter: str | None) -> CheckedTransformer:
    loaded = find_model(ModelSettings(str(family(name).folders[adapter]))).load(torch.float64, CPU)
    return CheckedTransformer(loaded.config, loaded.weights)


def logits(model: CheckedTransformer, canvases: Sequence[tuple[str | None, Canvas]]) -> list[Tensor]:
    """Those of all rows of canvases in one pass, float32 [T, V] each."""
    config, items, at = model.config, [], 0
    for adapter, canvas in canvases:
        count = len(canvas)
        table = plain_table(Extent(range(config.layers), np.arange(at, at + count), 1, count))
        state = CanvasState(canvas, Ledger(config.layers, count, None), (table,), adapter=adapter)
        block = config.block_length or count
        sees = np.minimum((np.arange(count) // block + 1) * block, count)
        every = np.ones(count, dtype=np.bool_)
        items.append((state, Plan((Span(range(config.layers), every),), predict=every, sees=sees)))
        at += count
    pool = Pool(config, at, 1, model.dtype, CPU)
    found = model.head(model.forward(pack(items, Target(CPU, sliding=config.sliding)), pool)).float()
    return list(torch.split(found, [len(canvas) for _, canvas in canvases]))


def oracle(name: str, adapter: str | None, canvas: Canvas) -> Tensor:
    """The same by decoders that know nothing of this package, of the weights that PEFT has merged."""
    folder, tokens = family(name).folders[adapter], torch.tensor(canvas.tokens)
    if name == "sdar":
        return sdar.load(folder).forward(tokens, 4).logits.float()
    if name == "gidd":
        return gidd.load(folder).forward(tokens).logits.float()
    return dense.load(folder).forward(tokens).logits.float()


def canvas(seed: int, prompt: int = 9, response: int = 7) -> Canvas:
    tokens = torch.randint(0, VOCAB, (prompt,), generator=torch.Generator().manual_seed(seed))
    return Canvas.masked(tokens.tolist(), response, 39)


@pytest.mark.parametrize("name", RAW)
def test_logits_are_those_of_peft_alone_and_in_a_mixed_batch(name: str) -> None:
    model = family(name).model
    asked = [(adapter, canvas(seed)) for seed, adapter in enumerate(["one", None, "two", "one", None])]
    together = logits(model, asked)
    for (adapter, own), found in zip(asked, together, strict=True):
        torch.testing.assert_close(found, oracle(name, adapter, own), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found, logits(model, [(adapter, own)])[0], atol=1e-6, rtol=1e-6)
    apart = [(found - oracle(name, None, own)).abs().max() for (_, own), found in zip(asked, together, strict=True)]
    assert [bool(distance > 0.1) for distance in apart] == [True, False, True, True, False]


def test_in_bfloat16_it_loses_about_as_much_as_merged_weights() -> None:
    rounded = family("dream", torch.bfloat16)
    for adapter in ADAPTERS:
        canvases = [canvas(seed) for seed in range(6)]
        apart = logits(rounded.model, [(adapter, own) for own in canvases])
        loaded = find_model(ModelSettings(str(rounded.folders[adapter]))).load(torch.bfloat16, CPU)
        merged = logits(CheckedTransformer(loaded.config, loaded.weights), [(None, own) for own in canvases])
        exact = [oracle("dream", adapter, own) for own in canvases]
        lost = [
            sum(float((a - b).square().mean()) for a, b in zip(each, exact, strict=True)) for each in (apart, merged)
        ]
        assert 0 < lost[0] < 2 * lost[1]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_over_a_quantized_base_products_are_added_to_its_own(kind: Quantization) -> None:
    model = family("dream", torch.float32, kind).model
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    w = model.weights.layers[1]
    change, rows = w.low_rank["gate_up"]["one"], AdapterRows.of([(None, 4), ("one", 5), (None, 3)])
    plain, found = F.linear(x, w.gate_up), model._linear(x, w, "gate_up", rows)
    torch.testing.assert_close(found[4:9] - plain[4:9], x[4:9] @ (change.up @ change.down).T, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[:4], plain[:4])
    assert torch.equal(found[9:], plain[9:])
    assert model.quantized


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_base_answers_alike_alone_and_in_a_batch(kind: Quantization) -> None:
    model = family("dream", torch.float32, kind).model
    requests = [request(f"{adapter} {number}", adapter, "bicache") for number in range(2) for adapter in NAMES]
    together = answers(model, requests, max_num_seqs=6)
    assert len({result.token_ids for result in together.values()}) > 1
    for each in requests:
        assert together[each.id].token_ids == answers(model, [each])[each.id].token_ids


def request(
    name: str, adapter: str | None, policy: str, prompt: Sequence[int] = PROMPT, prefix: int = 8, **more: Any
) -> Request:
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    chosen = parse(policy, {}, lambda: DepthLookup({5: 1}))
    return Request(name, prompt, params, prefix, policy=chosen, adapter=adapter, readers=(Logprobs(4),), **more)


def answers(model: CheckedTransformer, requests: Sequence[Request], **limits: Any) -> dict[str, Result]:
    engine = poisoned_engine(model, **{"max_model_len": 32, "store_budget_tokens": 64, **limits})
    found = run(engine, [Work(each, each.policy) for each in requests])
    assert all(result.error is None for result in found.values())
    return found


def same(one: Result, other: Result) -> None:
    """The same tokens in the same steps, and log-probabilities to 1e-5."""
    assert one.token_ids == other.token_ids
    for a, b in zip(one.trace, other.trace, strict=True):
        assert (a.step, a.positions, a.token_ids) == (b.step, b.positions, b.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


POLICIES = {
    "llada": ["none", "reuse", "bicache+block-dual", "dllm-cache", "dkv-decode"],
    "dream": ["none", "bicache", "bicache+dllm-cache"],
    "sdar": ["none", "exact"],
    "gidd": ["none", "uniform-cache"],
}


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "policy"), [(name, policy) for name, all_ in POLICIES.items() for policy in all_])
@pytest.mark.parametrize("invariant", [False, True])
def test_answers_are_those_of_merged_models(name: str, policy: str, invariant: bool) -> None:
    """Every request twice, so that the second one reads what the first one has stored."""
    requests = [request(f"{adapter} {number}", adapter, policy) for number in range(2) for adapter in NAMES]
    if name == "gidd":  # whose tokens have no log-probabilities
        requests = [replace(each, readers=()) for each in requests]
    found = answers(family(name).model, requests, batch_invariant=invariant, max_num_seqs=6)
    for each in requests:
        alone = replace(each, adapter=None)
        same(found[each.id], answers(merged_model(name, each.adapter), [alone])[each.id])
    assert len({result.token_ids for result in found.values()}) == 3


@pytest.mark.parametrize(("name", "policy"), [("llada", "reuse"), ("dream", "bicache"), ("sdar", "exact")])
def test_no_stored_state_crosses(name: str, policy: str) -> None:
    """One after the other on one engine, with one prompt: a request finds what its own adapter has stored alone."""
    engine = poisoned_engine(family(name).model, max_model_len=32, store_budget_tokens=64, page_size=4)
    asked = [
        request(f"{number} {adapter}", adapter, policy, prefix=8)
        for number, adapter in enumerate([None, "one", "two", "one", None, "two"])
    ]
    results = served(engine, *(Work(each, each.policy) for each in asked))
    assert [result.error for result in results] == [None] * 6
    assert [result.usage.cached_tokens > 0 for result in results] == [False] * 3 + [True] * 3


def test_no_tenant_can_spell_an_adapter() -> None:
    salts = [
        replace(request("r", adapter, "none"), cache_salt=salt).salt
        for adapter in (None, "one", "onex", "3:one")
        for salt in ("", "x", "one", "3:one", "3:onex", "0:", "0:3:one")
    ]
    assert len(set(salts)) == len(salts)


def test_recent_prompts_are_found_within_an_adapter() -> None:
    engine = poisoned_engine(
        family("llada").model, max_model_len=32, store_budget_tokens=64, prefix_sharing="auto", prefix_min=4
    )
    asked = [
        replace(request(str(number), adapter, "reuse", prefix=0), find_prefix=True)
        for number, adapter in enumerate([None, "one", None, "one", "two"])
    ]
    results = served(engine, *(Work(each, each.policy) for each in asked))
    assert [result.usage.prefix_tokens > 0 for result in results] == [False, False, True, True, False]


def test_an_unknown_adapter_is_refused() -> None:
    engine = poisoned_engine(family("dream").model)
    with pytest.raises(UnknownNameError, match=r"Unknown adapter 'ones'\. Did you mean 'one'\?"):
        engine.check(request("r", "ones", "none"))


def test_rows_of_one_adapter_are_one_product() -> None:
    counts = [(None, 3), ("one", 2), ("one", 4), ("two", 0), ("two", 1), (None, 0), ("one", 2)]
    assert AdapterRows.of(counts).runs == (
        ("one", slice(3, 9)), ("two", slice(9, 10)), ("one", slice(10, 12)),
    )  # fmt: skip
    assert AdapterRows.of([(None, 3), (None, 1)]).runs == ()
