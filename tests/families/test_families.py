import json
from typing import Any

import pytest
import torch

from remask.denoising.noise import Noise
from remask.errors import CheckpointError, UnknownNameError
from remask.families import FAMILIES, Family, family_of, preset
from remask.families.diffusion_gemma import DIFFUSION_GEMMA as DIFFUSION_GEMMA_FAMILY
from remask.families.dream import DREAM as DREAM_FAMILY
from remask.families.family import Factors
from remask.families.gidd import GIDD as GIDD_FAMILY
from remask.families.illada import ILLADA as ILLADA_FAMILY
from remask.families.llada import LLADA as LLADA_FAMILY
from remask.families.sdar import SDAR as SDAR_FAMILY
from remask.model.config import ModelConfig
from remask.model.weights import empty_weights
from remask.request.sampling_params import SamplingDefaults
from tests.checkpoint.checkpoints import (
    A2D,
    DIFFUSION_GEMMA,
    DREAM,
    FAST_DLLM_V2,
    GIDD,
    ILLADA,
    LLADA,
    LLADA2,
    LLADA_MOE,
    MODERNBERT,
    NEMOTRON,
    SDAR,
    SDAR_MOE,
    STABLE_DIFFCODER,
    SUMI,
)
from tests.engine.support import small_config

RAW = {
    "llada": LLADA,
    "dream": DREAM,
    "gidd": GIDD,
    "sdar": SDAR,
    "fast-dllm-v2": FAST_DLLM_V2,
    "llada-moe": LLADA_MOE,
    "llada2": LLADA2,
    "sdar-moe": SDAR_MOE,
    "illada": ILLADA,
    "a2d": A2D,
    "stable-diffcoder": STABLE_DIFFCODER,
    "modernbert": MODERNBERT,
    "nemotron-labs-diffusion": NEMOTRON,
    "diffusion-gemma": DIFFUSION_GEMMA,
    "sumi": SUMI,
}

SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "mask_token_id", "eos_token_id"),
)


def published(raw: dict[str, Any], *sizes: int | None, **more: Any) -> dict[str, Any]:
    """`raw` with the values of `SIZES` in their order; None: the file has no such key."""
    return raw | dict(zip(SIZES, sizes, strict=True)) | more


PUBLISHED: dict[str, dict[str, Any]] = {
    "llada-8b": LLADA
    | {
        "d_model": 4096,
        "n_heads": 32,
        "n_kv_heads": 32,
        "n_layers": 32,
        "mlp_hidden_size": 12288,
        "vocab_size": 126464,
        "embedding_size": 126464,
        "max_sequence_length": 4096,
        "mask_token_id": 126336,
        "eos_token_id": 126081,
    },
    "dream-7b": published(DREAM, 3584, 28, 4, 28, 18944, 152064, 131072, 151666, 151643, sliding_window=131072),
    "gidd-unif-3b": published(GIDD, 3072, 24, None, 19, 12288, 131072, 2048, None, 1, head_dim=128),
    "sdar-4b": published(SDAR, 2560, 32, 8, 36, 9728, 151936, 32768, 151669, 151643, head_dim=128),
    "illada-8b": published(ILLADA, 4096, 32, 8, 32, 14336, 155136, 8192, None, 2),
    "stable-diffcoder-8b-instruct": published(STABLE_DIFFCODER, 4096, 32, 8, 32, 14336, 155136, 8192, None, 2),
    "llada-moe-7b-a1b": published(
        *(LLADA_MOE, 2048, 16, None, 16, None, 157184, 8192, None, 156892),
        dense_intermediate_size=None,
        expert_intermediate_size=1024,
        shared_expert_intermediate_size=None,
        moe_layer_freq=[1] * 16,
        num_experts=64,
        num_experts_per_tok=8,
        partial_rotary_factor=1,
    ),
    "llada2-mini": published(
        *(LLADA2, 2048, 16, 4, 20, 5120, 157184, 16384, None, None),
        head_dim=128,
        moe_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        num_shared_experts=1,
        n_group=8,
        topk_group=4,
        pad_token_id=156892,
    ),
    "llada2.2-mini": published(
        *(LLADA2, 2048, 16, 4, 20, 5120, 157184, 131072, None, None),
        head_dim=128,
        moe_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        num_shared_experts=1,
        n_group=8,
        topk_group=4,
        pad_token_id=None,
        eos_token_id=[156892, 156900],
        expert_capacity=48,
        block_size=32,
        delete_token_id=156930,
        split_token_id=156931,
        rope_parameters={"rope_type": "default", "rope_theta": 3000000, "partial_rotary_factor": 0.5},
    ),
    "sumi-7b": published(
        *(SUMI, 4096, 32, 8, 36, 12288, 100278, 4864, None, 100257),
        head_dim=128,
        add_qkv_bias=False,
        bos_token_id=100256,
        rms_norm_eps=1e-5,
    ),
    "sdar-30b-a3b": published(
        *(SDAR_MOE, 2048, 32, 4, 48, None, 151936, 32768, 151669, 151643),
        head_dim=128,
        moe_intermediate_size=768,
        mlp_only_layers=[],
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "diffusiongemma-26b-a4b": DIFFUSION_GEMMA
    | {
        "canvas_length": None,
        "text_config": published(
            *(DIFFUSION_GEMMA["text_config"], 2816, 16, 8, 30, 2112, 262144, 262144, None, 1),
            num_global_key_value_heads=2,
            head_dim=None,
            global_head_dim=None,
            layer_types=None,
            sliding_window=1024,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
        ),
    },
    "modernbert-large-chat": published(
        MODERNBERT, 1024, 16, None, 28, 2624, 50368, 8192, None, 50282, local_attention=128
    ),
}
"""What published configurations say, by the preset that they map to."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_map_to_their_presets(name: str) -> None:
    assert family_of(PUBLISHED[name]).config(PUBLISHED[name]) == preset(name)


def test_every_key_of_a_small_configuration_arrives() -> None:
    assert LLADA_FAMILY.config(LLADA | {"weight_tying": True}) == ModelConfig(
        family="llada", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, intermediate=24, vocab=40, max_length=64,
        rope_theta=500000.0, norm_eps=1e-5, mask_id=39, stop_ids=(38,), qkv_bias=False, tied=True, shift=0,
        rope_float32=True,
    )  # fmt: skip
    assert DREAM_FAMILY.config(DREAM) == ModelConfig(
        family="dream", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, intermediate=24, vocab=40, max_length=64,
        rope_theta=1e6, norm_eps=1e-6, mask_id=39, stop_ids=(38,), qkv_bias=True, tied=False, shift=1,
        sampling=SamplingDefaults("entropy", time_schedule=True),
    )  # fmt: skip


@pytest.mark.parametrize("raw", [LLADA, DREAM, SDAR])
def test_the_turn_end_stops_only_in_the_published_vocabulary(raw: dict[str, Any]) -> None:
    assert family_of(raw).config(raw).stop_ids == (38,)
    assert family_of(raw).config(raw | {"eos_token_id": [7, 38, 7]}).stop_ids == (7, 38)
    assert family_of(raw).config(raw | {"eos_token_id": None}).stop_ids == ()


def test_the_embedding_may_have_more_rows_than_words() -> None:
    assert LLADA_FAMILY.config(LLADA | {"embedding_size": 64}).vocab == 64
    assert LLADA_FAMILY.config(LLADA | {"embedding_size": None}).vocab == 40
    with pytest.raises(CheckpointError, match=r"'embedding_size' is 39.*at least 'vocab_size' = 40"):
        LLADA_FAMILY.config(LLADA | {"embedding_size": 39})


def test_absent_key_heads_are_as_many_as_heads() -> None:
    assert LLADA_FAMILY.config(LLADA | {"n_kv_heads": None}).kv_heads == 4
    assert LLADA_FAMILY.config(LLADA | {"n_kv_heads": 1, "multi_query_attention": True}).kv_heads == 1
    with pytest.raises(CheckpointError, match="'n_kv_heads' is 2"):
        LLADA_FAMILY.config(LLADA | {"multi_query_attention": True})
    without = {key: value for key, value in DREAM.items() if key != "num_key_value_heads"}
    assert DREAM_FAMILY.config(without).kv_heads == 4


@pytest.mark.parametrize(
    ("raw", "key", "value"),
    [
        (LLADA, "alibi", True),
        (LLADA, "layer_norm_type", "default"),
        (LLADA, "block_type", "sequential"),
        (LLADA, "activation_type", "swiglu"),
        (LLADA, "rope", False),
        (LLADA, "include_bias", True),
        (LLADA, "include_qkv_bias", True),
        (LLADA, "bias_for_layer_norm", True),
        (LLADA, "attention_layer_norm", True),
        (LLADA, "scale_logits", True),
        (LLADA, "input_emb_norm", True),
        (LLADA, "layer_norm_with_affine", False),
        (LLADA, "block_group_size", 2),
        (LLADA, "clip_qkv", 8.0),
        (LLADA, "n_heads", 3),
        (LLADA, "n_kv_heads", 3),
        (LLADA, "n_layers", 0),
        (LLADA, "n_layers", True),
        (LLADA, "n_layers", "2"),
        (LLADA, "rope_theta", float("nan")),
        (LLADA, "rms_norm_eps", -1.0),
        (LLADA, "mask_token_id", 40),
        (LLADA, "eos_token_id", [1, 40]),
        (LLADA, "eos_token_id", "</s>"),
        (LLADA, "weight_tying", "no"),
        (DREAM, "hidden_act", "gelu"),
        (DREAM, "num_attention_heads", 16),
        (DREAM, "mask_token_id", -1),
        (GIDD, "head_dim", 8),
        (GIDD, "num_attention_heads", 3),
        (GIDD, "noise_type", "uniform"),
        (GIDD, "min_log_snr", float("inf")),
        (GIDD, "attn_soft_cap", -30.0),
        (GIDD, "use_qk_norm", 1),
        (GIDD, "attention_bias", "yes"),
        (GIDD, "mask_token_id", 40),
        (GIDD, "eos_token_id", [1, -1]),
        (SDAR, "hidden_act", "gelu"),
        (SDAR, "attention_bias", True),
        (SDAR, "num_key_value_heads", 3),
        (SDAR, "head_dim", 1),
        (SDAR, "block_size", 0),
        (SDAR, "mask_token_id", 40),
        (NEMOTRON, "attention_bias", True),
        (NEMOTRON, "sliding_window", 64),
        (NEMOTRON, "dlm_paradigm", "uniform"),
        (NEMOTRON, "block_size", 0),
        (A2D, "block_size", 0),
        (A2D, "right_shift_logits", 1),
        (ILLADA, "hidden_act", "gelu"),
        (ILLADA, "attention_bias", True),
        (ILLADA, "mlp_bias", True),
        (ILLADA, "num_key_value_heads", 3),
        (ILLADA, "head_dim", 8),
        (ILLADA, "mask_token_id", 40),
        (ILLADA, "eos_token_id", 40),
        (LLADA_MOE, "num_experts", 0),
        (LLADA_MOE, "num_experts", 2**20),
        (LLADA_MOE, "num_experts_per_tok", 7),
        (LLADA_MOE, "moe_layer_freq", [1]),
        (LLADA_MOE, "moe_layer_freq", [1, 2]),
        (LLADA_MOE, "clip_qkv", 8.0),
        (LLADA_MOE, "attention_bias", True),
        (LLADA_MOE, "moe_router_enable_expert_bias", True),
        (LLADA_MOE, "partial_rotary_factor", 0.3),
        (LLADA_MOE, "partial_rotary_factor", 1.5),
        (LLADA_MOE, "mask_token_id", 40),
        (LLADA2, "score_function", "softmax"),
        (LLADA2, "router_dtype", "bf16"),
        (LLADA2, "norm_topk_prob", False),
        (LLADA2, "n_group", 4),
        (LLADA2, "n_group", 6),
        (LLADA2, "topk_group", 4),
        (LLADA2, "num_experts_per_tok", 5),
        (LLADA2, "norm_head", True),
        (LLADA2, "use_qkv_bias", True),
        (LLADA2, "routed_scaling_factor", 0),
        (MODERNBERT, "attention_bias", True),
        (MODERNBERT, "classifier_bias", True),
        (MODERNBERT, "norm_bias", True),
        (MODERNBERT, "hidden_activation", "silu"),
        (MODERNBERT, "decoder_bias", 1),
        (MODERNBERT, "num_key_value_heads", 2),
        (MODERNBERT, "local_attention", 1),
        (MODERNBERT, "sliding_window", 0),
        (MODERNBERT, "local_rope_theta", 0),
        (MODERNBERT, "global_attn_every_n_layers", 0),
        (MODERNBERT, "layer_types", ["full_attention"] * 4),
        (MODERNBERT, "rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        (MODERNBERT, "rope_parameters", {"rope_type": "default", "rope_theta": 3.0}),
        (SDAR_MOE, "norm_topk_prob", "yes"),
        (SDAR_MOE, "mlp_only_layers", [2]),
        (SDAR_MOE, "mlp_only_layers", 0),
        (SDAR_MOE, "decoder_sparse_step", 0),
        (SDAR_MOE, "num_experts_per_tok", 0),
    ],
)
def test_what_the_transformer_cannot_do_is_refused_by_key_and_value(raw: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        family_of(raw).config(raw | {key: value})
    message = str(caught.value)
    assert f"{key!r} is {json.dumps(value)}" in message
    assert "supported: " in message


@pytest.mark.parametrize(
    ("raw", "key"),
    [(LLADA, key) for key in LLADA if key not in ("model_type", "architectures", "auto_map", "embedding_size")]
    + [(raw, key) for raw in (DREAM, GIDD, SDAR, ILLADA) for key in raw],
)
def test_a_missing_key_is_named_or_has_a_documented_meaning(raw: dict[str, Any], key: str) -> None:
    family = family_of(raw)
    without = {other: value for other, value in raw.items() if other != key}
    optional = {"model_type", "architectures", "auto_map", "eos_token_id", "n_kv_heads", "num_key_value_heads"}
    optional |= {"hidden_act", "rope_scaling", "sliding_window", "use_sliding_window", "tie_word_embeddings"}
    optional |= {"block_size", "attention_bias"} if raw is SDAR else {"attn_soft_cap"}
    optional |= {"attention_bias", "mlp_bias", "bos_token_id", "pad_token_id"} if raw is ILLADA else set()
    # Read by what multiplies the weights, not by what shapes the model; SDAR's heads have a width of their own.
    factors = {"resid_scale", "head_scaling", "weight_scaling"}
    optional |= {"head_dim"} if raw is GIDD else set()
    if key in factors:
        with pytest.raises(CheckpointError, match=f"the key '{key}' is missing; supported: "):
            family.factors(without)
    elif key in optional:
        assert family.config(without).layers == 2
    else:
        with pytest.raises(CheckpointError, match=f"the key '{key}' is missing; supported: "):
            family.config(without)


def test_fast_dllm_v2_is_block_causal_and_shifted() -> None:
    config = family_of(FAST_DLLM_V2).config(FAST_DLLM_V2)
    assert (config.kind, config.shift, config.qkv_bias, config.block_length) == ("block_causal", 1, True, 8)
    published = {key: value for key, value in FAST_DLLM_V2.items() if key not in ("bd_size", "mask_token_id")}
    config = family_of(published).config(published | {"vocab_size": 152064})
    assert (config.block_length, config.mask_id, config.stop_ids) == (32, 151665, (38, 151645))


def test_the_family_is_told_by_model_type_then_by_architecture() -> None:
    assert family_of({"model_type": "dream"}) is DREAM_FAMILY
    assert family_of({"architectures": ["LLaDAModelLM"]}) is LLADA_FAMILY
    with pytest.raises(
        UnknownNameError,
        match=r"model_type 'lada'\. Did you mean 'llada'",
    ):
        family_of({"model_type": "lada", "architectures": ["LLaDAModelLM"]})
    with pytest.raises(
        UnknownNameError,
        match=r"'GPTModel'\. Available: A2D.* DreamModel,",
    ):
        family_of({"architectures": ["GPTModel"]})
    neither: list[dict[str, Any]] = [{}, {"model_type": 3}, {"architectures": []}]
    for raw in neither:
        with pytest.raises(CheckpointError, match="Supported model types: llada, Dream"):
            family_of(raw)


# DiffusionGemma's output matrix is always the embedding.
@pytest.mark.parametrize(
    ("family", "tied"),
    [(each, tied) for each in FAMILIES for tied in (False, True) if tied or each.name != "diffusion-gemma"],
    ids=lambda each: each if isinstance(each, bool) else each.name,
)
def test_slots_fill_every_weight_exactly_once(family: Family, tied: bool) -> None:
    raw = RAW[family.name] | {"weight_tying" if family is LLADA_FAMILY else "tie_word_embeddings": tied}
    config = family.config(raw)
    weights = empty_weights(config, torch.float32, torch.device("cpu"))
    for tensor in weights.tensors():
        tensor.zero_()
    slots = family.tensors(config)
    for slot in slots:
        assert slot.target(weights).shape == slot.shape
        slot.target(weights).add_(1)
    assert all(bool((tensor == 1).all()) for tensor in weights.tensors())
    assert len({slot.name for slot in slots}) == len(slots)
    assert sum(slot.target(weights).numel() for slot in slots) == config.parameters


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "'llama': an autoregressive model.*'a2d-llama'",
        ),
        ({"model_type": "Qwen2"}, "'Qwen2': an autoregressive model, .*'a2d-qwen2'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "'architectures' is 'Qwen3ForCausalLM': an auto.*'a2d-qwen3'"),
        ({"model_type": "bert"}, "'bert': an encoder, .* by training it to denoise"),
        ({"architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM': an encoder"),
    ],
)
def test_bases_are_told_from_diffusion_models_made_of_them(said: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        family_of(said)


def test_stable_diffcoder_is_told_from_llama_by_either_key() -> None:
    for key in ("architectures", "auto_map"):
        raw = {other: value for other, value in STABLE_DIFFCODER.items() if other != key}
        found = family_of(raw)
        assert (found.name, found.config(raw).mask_id, found.config(raw).block_length) == ("stable-diffcoder", 5, 4)


def test_a2d_sees_all_or_blocks() -> None:
    family = family_of(A2D)
    plain = family.config(A2D | {"right_shift_logits": None})
    windows = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    blocks = family.config(A2D | {"block_size": 8, **windows})
    assert (plain.kind, plain.shift, plain.block_length) == ("masked", 0, None)
    assert (blocks.kind, blocks.shift, blocks.block_length) == ("block_causal", 1, 8)
    assert family.remark("Qwen3-0.6B-diffusion-mdlm-v0.1", plain) is None
    assert family.remark("Qwen3-0.6B-diffusion-bd3lm-v0.1", blocks) is None
    said = family.remark("Qwen3-0.6B-diffusion-bd3lm-v0.1", plain)
    assert said is not None
    assert "--hf-overrides '{\"block_size\": 32}'" in said


def test_every_key_of_the_newer_families_arrives() -> None:
    assert GIDD_FAMILY.config(GIDD) == ModelConfig(
        family="gidd", layers=2, hidden=16, heads=4, kv_heads=4, head_dim=4, intermediate=24, vocab=40, max_length=64,
        rope_theta=10000.0, norm_eps=1e-6, mask_id=3, stop_ids=(1,), kind="uniform", qk_norm="whole", sink="learned",
        score_cap=30.0, mlp="relu2", mlp_bias=True, noise=Noise(1000.0, -9.0, 9.0, 40, 3),
    )  # fmt: skip
    assert SDAR_FAMILY.config(SDAR) == ModelConfig(
        family="sdar", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=8, intermediate=24, vocab=40, max_length=64,
        rope_theta=1e6, norm_eps=1e-6, mask_id=39, stop_ids=(38,), kind="block_causal", qk_norm="head", block_length=4,
    )  # fmt: skip
    assert ILLADA_FAMILY.config(ILLADA) == ModelConfig(
        family="illada", layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, intermediate=24, vocab=40, max_length=64,
        rope_theta=500000.0, norm_eps=1e-5, mask_id=5, stop_ids=(2,), tied=True,
        sampling=SamplingDefaults(growing_canvas=True),
    )  # fmt: skip


def test_what_null_means() -> None:
    gidd = GIDD_FAMILY.config(GIDD | {"mask_token_id": None, "eos_token_id": None, "attn_soft_cap": None})
    assert (gidd.mask_id, gidd.stop_ids, gidd.score_cap) == (3, (1,), None)
    assert GIDD_FAMILY.config(GIDD | {"attn_soft_cap": 0}).score_cap is None
    other = GIDD_FAMILY.config(GIDD | {"mask_token_id": 7, "eos_token_id": [5, 6]})
    assert (other.mask_id, other.stop_ids, other.noise) == (7, (5, 6), Noise(1000.0, -9.0, 9.0, 40, 7))
    assert SDAR_FAMILY.config(SDAR | {"block_size": None}).block_length is None
    illada = ILLADA_FAMILY.config(ILLADA | {"mask_token_id": None, "eos_token_id": None, "head_dim": 4})
    assert (illada.mask_id, illada.stop_ids) == (5, (2,))
    other = ILLADA_FAMILY.config(ILLADA | {"mask_token_id": 7, "eos_token_id": [2, 9]})
    assert (other.mask_id, other.stop_ids) == (7, (2, 9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scaling": "fan-in"}, '\'weight_scaling\' is "fan-in"; supported: "fan_in", "fan_out" or a positive'),
        ({"weight_scaling": 0}, "'weight_scaling' is 0"),
        ({"resid_scale": "4"}, "'resid_scale' is"),
        ({"head_scaling": -1.0}, "'head_scaling' is -1.0"),
    ],
)
def test_bad_factors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        GIDD_FAMILY.factors(GIDD | change)


def test_a_gain_is_added_to_all_norms_outside_of_mixtures() -> None:
    slots = DIFFUSION_GEMMA_FAMILY.tensors(small_config("diffusion-gemma"), Factors(gain=1.0))
    fields = {"norm", "signal.norm", "attn_norm", "q_norm", "k_norm", "attn_post", "ffn_norm", "ffn_post"}
    assert {slot.field for slot in slots if slot.offset} == fields


def test_factors() -> None:
    plain = GIDD_FAMILY.factors(GIDD)
    assert plain == Factors(linear=1.0, residual=4.0 / 2, head=0.5, gain=1.0)
    assert GIDD_FAMILY.factors(GIDD | {"tie_word_embeddings": True, "head_scaling": None}).head == 1.0
    assert SDAR_FAMILY.factors(SDAR) == Factors()
    for linear, expected in (("fan_in", 0.5), ("fan_out", 0.25), (0.3, 0.3)):
        assert GIDD_FAMILY.factors(GIDD | {"weight_scaling": linear}).of((16, 4)) == expected
