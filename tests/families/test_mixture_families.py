"""Families with experts: configurations, shapes of published models, loading, and what is refused before loading."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remask.checkpoint.load import load_weights, name_ranges, read_config
from remask.errors import CheckpointError
from remask.families import family_of, preset
from remask.families.llada import LLADA
from remask.families.llada2 import LLADA2
from remask.families.llada_moe import LLADA_MOE
from remask.families.sdar import SDAR_MOE
from remask.model.config import Mixture, ModelConfig, Router
from tests.checkpoint import checkpoints
from tests.checkpoint.checkpoints import random_tensors, write
from tests.families.test_families import PUBLISHED

CPU = torch.device("cpu")
EACH = pytest.mark.parametrize("raw", [checkpoints.LLADA_MOE, checkpoints.LLADA2, checkpoints.SDAR_MOE])


@pytest.mark.parametrize(
    ("name", "resident", "active"),
    # What the models' names and cards say: 7B-A1B, 16B-A1.4B, 100B-A6B, and 30.5B-A3.3B of Qwen3-30B-A3B.
    [
        ("llada-moe-7b-a1b", 7.36, 1.43),
        ("llada2-mini", 16.3, 1.4),
        ("llada2-flash", 103, 6.1),
        ("sdar-30b-a3b", 30.5, 3.3),
    ],
)
def test_resident_and_active_parameters_are_the_published_ones(name: str, resident: float, active: float) -> None:
    config = preset(name)
    assert config.parameters / 1e9 == pytest.approx(resident, rel=0.02)
    # The cards do not count the embedding, which is looked up, among what is active; for some they do.
    assert (config.active_parameters - config.vocab * config.hidden) / 1e9 <= active * 1.02
    assert config.active_parameters / 1e9 >= active * 0.98


def test_every_key_of_a_small_configuration_arrives() -> None:
    common: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "intermediate": 24, "vocab": 40}
    common |= {"max_length": 64, "mask_id": 39, "stop_ids": (38,), "qk_norm": "head"}
    assert LLADA_MOE.config(checkpoints.LLADA_MOE) == ModelConfig(
        family="llada-moe", head_dim=4, rope_theta=50000.0, norm_eps=1e-5, rotary_dim=2, **common,
        mixture=Mixture(experts=6, active=2, intermediate=6, shared=10, dense_layers=(0,)),
    )  # fmt: skip
    assert LLADA2.config(checkpoints.LLADA2) == ModelConfig(
        family="llada2", head_dim=8, rope_theta=600000.0, norm_eps=1e-6, rotary_dim=4, kind="block_causal",
        block_length=32, **common,
        mixture=Mixture(
            experts=6, active=2, intermediate=6, shared=12, dense_layers=(0,),
            router=Router("sigmoid", bias=True, groups=3, kept_groups=2, normalise=True, scale=2.5, float32=True),
        ),
    )  # fmt: skip
    assert SDAR_MOE.config(checkpoints.SDAR_MOE) == ModelConfig(
        family="sdar-moe", head_dim=8, rope_theta=1e6, norm_eps=1e-6, kind="block_causal", block_length=4, **common,
        mixture=Mixture(experts=6, active=2, intermediate=6, dense_layers=(0,), router=Router(normalise=True)),
    )  # fmt: skip


def test_llada_moe_is_told_from_llada_although_both_say_llada() -> None:
    raw = checkpoints.LLADA_MOE
    without = {key: value for key, value in raw.items() if key != "architectures"}
    assert family_of(raw) is family_of(without) is LLADA_MOE
    assert family_of(without | {"model_type": "lladamoe"}) is LLADA_MOE
    assert family_of({"architectures": ["LLaDAMoEModelLM"]}) is LLADA_MOE
    assert family_of(checkpoints.LLADA) is LLADA
    assert family_of({"model_type": "llada", "architectures": "LLaDAMoEModelLM"}) is LLADA


def test_which_layers_have_experts() -> None:
    raw = PUBLISHED["sdar-30b-a3b"] | {
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    mixture = SDAR_MOE.config(raw).mixture
    assert mixture is not None
    assert mixture.dense_layers == (0, 2, 3, 4)
    assert SDAR_MOE.config(PUBLISHED["sdar-30b-a3b"] | {"intermediate_size": None}).intermediate == 0
    with pytest.raises(CheckpointError, match="'intermediate_size' is missing"):
        SDAR_MOE.config(raw | {"intermediate_size": None})
    with pytest.raises(CheckpointError, match="'dense_intermediate_size' is missing"):
        LLADA_MOE.config(checkpoints.LLADA_MOE | {"dense_intermediate_size": None})


def test_weights_of_one_expert_are_not_divided_by_their_sum_in_llada2() -> None:
    one = LLADA2.config(checkpoints.LLADA2 | {"num_experts_per_tok": 1}).mixture
    assert one is not None
    assert not one.router.normalise


def test_a_published_mask_needs_the_published_vocabulary() -> None:
    for raw in (checkpoints.LLADA_MOE, checkpoints.LLADA2):
        with pytest.raises(CheckpointError, match="'mask_token_id' is missing; supported: a token id below 40"):
            family_of(raw).config(raw | {"mask_token_id": None})


@EACH
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_arrive_in_their_places(tmp_path: Path, raw: dict[str, Any], shards: int, dtype: torch.dtype) -> None:
    held = random_tensors(raw)
    folder = write(tmp_path, raw, held, shards=shards)
    family, config = read_config(folder)
    weights = load_weights(folder, family, config, dtype, CPU, progress=False)
    dense, layer = weights.layers
    assert dense.mixture is None
    assert torch.equal(dense.down, held["model.layers.0.mlp.down_proj.weight"].to(dtype))
    assert layer.mixture is not None
    stem = "model.layers.1.mlp."
    for expert in range(6):
        gate, up, down = (
            held[f"{stem}experts.{expert}.{name}_proj.weight"].to(dtype) for name in ("gate", "up", "down")
        )
        assert torch.equal(layer.mixture.gate_up[expert], torch.cat([gate, up]))
        assert torch.equal(layer.mixture.down[expert], down)
    exact = torch.float32 if raw is checkpoints.LLADA2 else dtype
    assert layer.mixture.router.dtype == exact
    assert torch.equal(layer.mixture.router, held[f"{stem}gate.weight"].to(exact))
    if raw is checkpoints.LLADA2:
        assert layer.mixture.bias is not None
        assert torch.equal(layer.mixture.bias, held[f"{stem}gate.expert_bias"])
        assert torch.equal(layer.qkv, held["model.layers.1.attention.query_key_value.weight"].to(dtype))
    shared = {"llada-moe": "model.layers.1.shared_expert.", "llada2": f"{stem}shared_experts."}.get(config.family)
    expected = torch.empty(16, 0, dtype=dtype) if shared is None else held[f"{shared}down_proj.weight"].to(dtype)
    assert torch.equal(layer.down, expected)


@EACH
def test_missing_experts_are_listed_by_range_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any]
) -> None:
    held = {
        name: t for name, t in random_tensors(raw).items() if not any(f"experts.{e}." in name for e in (1, 2, 3, 5))
    }
    folder = write(tmp_path, raw, held)
    family, config = read_config(folder)
    monkeypatch.setattr("remask.checkpoint.load.empty_weights", lambda *_: pytest.fail("weights were allocated"))
    with pytest.raises(CheckpointError, match="12 missing: ") as caught:
        load_weights(folder, family, config, torch.float32, CPU, progress=False)
    assert "model.layers.1.mlp.experts.{1-3,5}.up_proj.weight [6, 16];" in str(caught.value)


@EACH
def test_far_more_experts_than_tensors_are_refused_without_listing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any]
) -> None:
    folder = write(tmp_path, raw | {"num_experts": 4095}, random_tensors(raw))
    family, config = read_config(folder)
    monkeypatch.setattr(type(family), "tensors", lambda *_: pytest.fail("the tensors were listed"))
    with pytest.raises(CheckpointError, match=r"describes 2 layers and 4095 experts in them, and its files list \d\d "):
        load_weights(folder, family, config, torch.float32, CPU, progress=False)


def test_ranges() -> None:
    names = [f"a.{layer}.b.{expert}.c" for layer in (0, 1, 3) for expert in (0, 1, 2, 7)]
    assert name_ranges(["x", *names, "a.5.b.9.c", "a.1.c", "a.2.c"]) == [
        "x",
        "a.1.c",
        "a.2.c",
        "a.{0-1,3}.b.{0-2,7}.c",
        "a.5.b.9.c",
    ]


def test_a_configuration_without_a_mixture_is_as_ever() -> None:
    config = preset("llada-tiny")
    assert config.active_parameters == config.parameters
    assert replace(config, rotary_dim=16).parameters == config.parameters
