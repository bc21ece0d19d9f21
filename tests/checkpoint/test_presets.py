import pytest
import torch

from remask.checkpoint.loaded import dummy_weights
from remask.errors import UnknownNameError
from remask.families import PRESETS, preset
from remask.model.weights import empty_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "parameters", "within"),
    [
        # What the model cards of LLaDA-8B, of Qwen2.5-7B (Dream's shape) and of Qwen3-8B (SDAR's) publish.
        ("llada-8b", 8_015_581_184, 0),
        ("llada-1.5", 8_015_581_184, 0),
        ("dream-7b", 7_615_616_512, 0),
        ("sdar-8b", 8_190_735_360, 0),
        # What GIDD's notes give.
        ("gidd-unif-3b", 2.96e9, 5e6),
        ("gidd-mask-3b", 2.84e9, 5e6),
        ("gidd-unif-10b", 9.87e9, 5e6),
        # What its model card gives, with the experts that are not active.
        ("diffusiongemma-26b-a4b", 25.2e9, 6e7),
        # Shapes of measurements have about the parameters of their names.
        ("llada-100m", 137.8e6, 1e5),
        ("llada-1b", 1093.2e6, 1e5),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, parameters: float, within: float) -> None:
    assert preset(name).parameters == pytest.approx(parameters, rel=0, abs=within)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_consistent(name: str) -> None:
    config = preset(name)
    weights = empty_weights(config, torch.bfloat16, torch.device("meta"))
    assert sum({id(t): t.numel() for t in weights.tensors()}.values()) == config.parameters
    assert config.heads * config.head_dim == config.hidden or name.startswith(
        ("sdar", "qwen3", "diffusion", "nemotron")
    )
    assert config.heads % config.kv_heads == 0
    assert config.mask_id < config.vocab
    assert config.stop_ids
    assert all(stop < config.vocab and stop != config.mask_id for stop in config.stop_ids)


def test_an_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"preset 'lada-8b'\. Did you mean 'llada-8b', "):
        preset("lada-8b")


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])
def test_dummy_weights_are_normal_with_norms_of_one(name: str) -> None:
    weights = dummy_weights(preset(name), torch.float32, CPU)
    first = weights.layers[0]
    for norm in (weights.norm, *(first.named_tensors()[name] for name in ("attn_norm", "ffn_norm"))):
        assert bool((norm == 1).all())
    drawn = [weights.embed, weights.head, first.qkv, first.out, first.gate_up, first.down]
    drawn += [] if first.qkv_bias is None else [first.qkv_bias]
    for tensor in drawn:
        assert abs(float(tensor.mean())) < 0.01
        assert float(tensor.std()) == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(weights.layers[0].qkv, weights.layers[1].qkv)


def test_dummy_weights_follow_the_seed() -> None:
    config = preset("dream-tiny")
    one, same, other = (dummy_weights(config, torch.bfloat16, CPU, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors(), same.tensors(), strict=True))
    assert not torch.equal(one.embed, other.embed)
    assert one.embed.dtype == torch.bfloat16
