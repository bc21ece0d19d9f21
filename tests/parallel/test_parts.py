"""The parts of a model: that they are the whole, and that ranks which compute with them compute the same."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.checkpoint.loaded import FoundModel, dummy_weights, find_model
from remask.checkpoint.settings import ModelSettings
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.pack import pack_uncached
from remask.engine.runner import score_rows
from remask.errors import ConfigError
from remask.families import PRESETS, preset
from remask.model.config import ModelConfig, Sliding
from remask.model.pool import Pool
from remask.model.ranks import Ranks, Shard
from remask.model.transformer import Transformer
from remask.model.weights import Weights, empty_weights
from remask.plan.canvas import Canvas
from remask.sampling.rows import RowGroup, Signal
from tests.checkpoint import checkpoints
from tests.engine import kinds
from tests.engine.support import CPU
from tests.leftovers import lasting_folder
from tests.parallel.threads import together

GEMMA = checkpoints.DIFFUSION_GEMMA
RAW: dict[str, dict[str, Any]] = {
    "llada": checkpoints.LLADA,
    "llada, tied": checkpoints.LLADA | {"weight_tying": True},
    "dream": checkpoints.DREAM,
    "llada-moe": checkpoints.LLADA_MOE,
    "one K/V head": checkpoints.SDAR | {"num_key_value_heads": 1},
    "nemotron": checkpoints.NEMOTRON | {"num_key_value_heads": 4},
    "diffusion-gemma": GEMMA | {"text_config": GEMMA["text_config"] | {"num_experts": 8}},
    **kinds.RAW,
}


@cache
def found(name: str) -> FoundModel:
    folder = lasting_folder() / "model"
    checkpoints.write(folder, RAW[name], checkpoints.random_tensors(RAW[name]))
    return find_model(ModelSettings(str(folder)))


CASES = [(name, size) for name in RAW for size in (2, 3, 4) if Shard(0, size).fits(found(name).config)]
EACH = pytest.mark.parametrize(("name", "size"), CASES)


def weights(name: str, shard: Shard, dtype: torch.dtype = torch.float64) -> Weights:
    return found(name).load(dtype, CPU, shard=shard).weights


def expected(field: str, whole: Tensor, config: ModelConfig, shard: Shard, layer: int | None) -> Tensor:
    """A rank's part of a whole tensor, said another way than the loader says it: by axes of heads, experts, columns."""
    shape = config if layer is None else config.shape_of(layer)
    dim, ranks, rank = shape.head_dim, shard.size, shard.rank
    groups, heads = shape.kv_heads, shape.heads
    own_group = [rank] if groups == ranks else [rank * groups // ranks]
    if groups > ranks:
        own_group = list(range(rank * groups // ranks, (rank + 1) * groups // ranks))

    def q(rows: Tensor) -> Tensor:
        return rows.view(ranks, heads // ranks * dim, *rows.shape[1:])[rank]

    def kv(rows: Tensor) -> Tensor:
        return rows.view(groups, dim, *rows.shape[1:])[own_group].flatten(0, 1)

    def cut(rows: Tensor) -> Tensor:
        edges = [len(rows) * r // ranks for r in range(ranks + 1)]
        return rows[edges[rank] : edges[rank + 1]]

    name = field.removeprefix("mixture.").removeprefix("signal.")
    if field in ("mixture.gate_up", "mixture.down"):
        return whole.chunk(ranks)[rank]
    if name in ("qkv", "qkv_bias"):
        queries, *others = torch.split(whole, [heads * dim] + [groups * dim] * (1 if shape.tied_values else 2))
        return torch.cat((q(queries), *map(kv, others)))
    if name == "gate_up":
        return torch.cat([cut(half) for half in whole.chunk(2)]) if config.gated else cut(whole)
    whole_norm = config.qk_norm == "whole"
    by_name = {
        "out": lambda: q(whole.t()).t(),
        "down": lambda: cut(whole.t()).t(),
        "up_bias": lambda: cut(whole),
        "down_bias": lambda: whole if rank == 0 else torch.zeros_like(whole),
        "head": lambda: cut(whole),
        "head_bias": lambda: cut(whole),
        "q_norm": lambda: q(whole) if whole_norm else whole,
        "k_norm": lambda: kv(whole) if whole_norm else whole,
        "sink_k": lambda: whole[own_group],
        "sink_v": lambda: whole[own_group],
    }
    return by_name.get(name, lambda: whole)()


def check_parts(config: ModelConfig, size: int, whole: Weights, parts: list[Weights]) -> None:
    for rank, part in enumerate(parts):
        shard = Shard(rank, size)
        for field, layer, tensor in part.named_tensors():
            named = {(name, number): value for name, number, value in whole.named_tensors()}
            assert torch.equal(tensor, expected(field, named[field, layer], config, shard, layer)), (field, layer)
        assert torch.equal(part.head, expected("head", whole.head, config, shard, None))
        assert [name for name, _, _ in part.named_tensors()] == [name for name, _, _ in whole.named_tensors()]


@EACH
def test_ranks_read_their_parts_of_a_checkpoint(name: str, size: int) -> None:
    parts = [weights(name, Shard(rank, size)) for rank in range(size)]
    check_parts(found(name).config, size, weights(name, Shard()), parts)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("tiny")])
def test_ranks_draw_their_parts_of_dummy_weights(name: str) -> None:
    config = preset(name)
    whole = dummy_weights(config, torch.float32, CPU)
    check_parts(config, 2, whole, [dummy_weights(config, torch.float32, CPU, 0, Shard(r, 2)) for r in range(2)])


def test_parts_together_take_the_memory_of_the_whole_and_what_all_have() -> None:
    config, meta = preset("llada2-mini"), torch.device("meta")
    whole = empty_weights(config, torch.bfloat16, meta).nbytes
    parts = [empty_weights(config, torch.bfloat16, meta, Shard(rank, 4)).nbytes for rank in range(4)]
    (first, *others), extra = parts, 4 * parts[0] - whole
    assert others == [first] * 3
    # Three further copies of the embedding, of the routers and of the norms.
    router = config.layers * config.mixture.experts * (config.hidden * 4) if config.mixture else 0
    assert 3 * config.vocab * config.hidden * 2 < extra < 3 * (config.vocab * config.hidden * 2 + 1.1 * router)


def passed(name: str, ranks: Ranks) -> tuple[Tensor, Tensor, Pool]:
    """Final hidden states, logits, and K/V of one pass over two canvases on one rank; buffers are NaN before.

    Where a model takes in what was predicted, six rows of each canvas do, of a pass before.
    """
    config = found(name).config
    model = Transformer(config, weights(name, ranks.shard), ranks=ranks)
    pool = Pool(model.rank_config, 24, 1, torch.float64, CPU)
    for tensor in (*pool.k, *pool.v):
        tensor.fill_(math.nan)
    rng = np.random.default_rng(1)
    drawn = [rng.integers(0, config.vocab, count).tolist() for count in (11, 13)]
    end = -6 if config.self_conditioning else None
    canvases = [Canvas(each[:end], each[end:] if end else (), 6 if end else 0) for each in drawn]
    predict = [rng.random(len(canvas)) < 0.6 for canvas in canvases]
    for each in predict:
        each[0] = False
    batch = pack_uncached(model, canvases, predict)
    with torch.inference_mode():
        if batch.signals is not None:
            signal = Signal(0.5, batch.predict.numpy())  # row n has slot n
            rows = RowGroup(slice(0, len(batch.predict)), None, "logits", 0.0, None, None, 0, free=True, signal=signal)
            score_rows(model, model.forward(batch, pool), [rows], 0, pool)
            batch = replace(batch, signals=replace(batch.signals, slots=batch.signals.rows))
        hidden = model.forward(batch, pool)
        return hidden, model.head(hidden), pool


@EACH
def test_a_pass_of_several_ranks_is_that_of_one(name: str, size: int) -> None:
    hidden, logits, pool = passed(name, Ranks())
    config = found(name).config

    def close(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    every = together(size, lambda ranks: passed(name, ranks))
    close(torch.cat([part for _, part, _ in every], dim=1), logits)
    for rank, (own, _, kept) in enumerate(every):
        assert torch.equal(own, every[0][0]), "the same bits on every rank"
        close(own, hidden)
        if pool.signals is not None:
            assert kept.signals is not None
            close(kept.signals, pool.signals)
        each = [Shard(rank, size).kv_heads(config.shape_of(layer)) for layer in range(config.layers)]
        for part, whole, groups in zip((*kept.k, *kept.v), (*pool.k, *pool.v), (*each, *each), strict=True):
            close(part[: kept.spare], whole[: pool.spare, groups.start : groups.stop])


def test_a_part_holds_its_experts_only_and_rows_of_others_are_left_out() -> None:
    """NaN where no product has written would spread to every row."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        for own, _, _ in together(4, lambda ranks: passed("llada2", ranks)):
            assert own.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


SHAPE = replace(preset("llada-tiny"), heads=6, kv_heads=6, head_dim=8, hidden=48)


@pytest.mark.parametrize(
    ("config", "size", "said"),
    [
        (
            SHAPE,
            4,
            "its 6 attention heads are not a multiple of 4; its 6 heads of K/V are neither .* Use 1 or 2 or 3 or 6",
        ),
        (replace(SHAPE, kv_heads=3), 2, "its 3 heads of K/V are neither a multiple nor a divisor of 2"),
        (
            replace(SHAPE, sliding=Sliding((0,), 4, 1e4, kv_heads=3)),
            2,
            "its 3 heads of K/V are neither a multiple nor a divisor of 2",
        ),
        (preset("llada-moe-7b-a1b"), 3, "its 64 experts are not a multiple of 3"),
        (replace(SHAPE, intermediate=3), 6, "its feed-forward is 3 wide"),
        (preset("dream-7b"), 8, "its 28 attention heads are not a multiple of 8.* Use 1 or 2 or 4 or 28"),
        (replace(SHAPE, heads=7, kv_heads=7), 2, r"Use 1 or 7$"),
    ],
)
def test_what_cannot_be_cut_is_named(config: ModelConfig, size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel={size} cannot cut this .*{said}"):
        Shard(0, size).check(config)


def test_batch_invariance_is_refused() -> None:
    model = Transformer(SHAPE, dummy_weights(SHAPE, torch.float32, CPU, 0, Shard(0, 2)), ranks=_Two())
    with pytest.raises(ConfigError, match="batch_invariant=True cannot be kept with tensor_parallel=2"):
        Engine(model, EngineConfig(batch_invariant=True), "x")


class _Two(Ranks):
    shard = Shard(0, 2)
