"""A2D (dLLM): a Llama, Qwen2 or Qwen3 whose causal mask was taken away, and which was trained to denoise.

Tensors are those of the base, whose sliding windows are open. Row p predicts the token at p; with `right_shift_logits`
it goes on predicting the next one, as SmolLM2 with the adapter that comes with remask does. With `block_size` the model
is block-causal, and blocks are counted from the end of the prompt (BD3LM). The two kinds have the same `config.json` as
published: the name of the folder tells them apart. This file follows the authors' code; no published checkpoint was
loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.families import qwen
from remask.families.family import Family, tiny
from remask.families.fields import Fields
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

LLAMA, QWEN2, QWEN3 = "a2d-llama", "a2d-qwen2", "a2d-qwen3"
SAMPLING = SamplingDefaults(schedule="linear", blocks_from_prompt=True, whole_blocks=False)
BLOCK = 32  # of the authors' evaluation


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    base = str(raw.get("model_type", "")).casefold()
    fields = Fields(f"config.json ({base})", raw)
    fields.only("attention_bias", False, optional=True)
    if base == QWEN3:
        dim = fields.integer("head_dim", least=2)
    else:
        dim = fields.head_dim("hidden_size", "num_attention_heads")
    block = fields.block("block_size")
    return ModelConfig(
        family="a2d",
        qkv_bias=base == QWEN2,
        qk_norm="head" if base == QWEN3 else None,
        shift=1 if fields.flag("right_shift_logits", False) else 0,
        kind="masked" if block is None else "block_causal",
        block_length=block,
        sampling=SAMPLING,
        **qwen.shape(fields, dim, windows=True),
    )


def _remark(name: str, config: ModelConfig) -> str | None:
    if "-bd3lm-" not in f"{name}-".casefold() or config.block_length is not None:
        return None
    return (
        f"{name!r} is named as block-causal models are, and its config.json has no block_size, so every row sees all "
        f"others; if it was trained with blocks, pass --hf-overrides '{{\"block_size\": {BLOCK}}}'"
    )


_SMOLLM2 = ModelConfig(
    family="a2d",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    max_length=8192,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    mask_id=5,
    stop_ids=(2,),
    tied=True,
    shift=1,
    sampling=SAMPLING,
)

_BLOCKS: Mapping[str, Any] = {"kind": "block_causal", "block_length": 8}
# As Qwen3-0.6B and Qwen2.5-Coder-0.5B, with the first id behind their tokenizers' own as the mask; the checkpoint's
# config.json and tokenizer decide for a real one.
_QWEN3 = ModelConfig(
    family="a2d",
    layers=28,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=3072,
    vocab=151936,
    max_length=40960,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    mask_id=151669,
    stop_ids=(151643, qwen.END_OF_TURN),
    tied=True,
    qk_norm="head",
    sampling=SAMPLING,
)
_QWEN2 = replace(
    _QWEN3,
    layers=24,
    hidden=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    intermediate=4864,
    max_length=32768,
    mask_id=151665,
    qk_norm=None,
    qkv_bias=True,
)

A2D = Family(
    name="a2d",
    model_types=(LLAMA, QWEN2, QWEN3),
    architectures=("A2DLlamaLMHeadModel", "A2DQwen2LMHeadModel", "A2DQwen3LMHeadModel"),
    names=qwen.HEAD_NORM_NAMES,
    config=_config,
    remark=_remark,
    harmless=frozenset({"layer_types", "use_sliding_window"}),
    presets={
        "smollm2-135m": _SMOLLM2,
        "qwen3-0.6b-diffusion-mdlm": _QWEN3,
        "qwen2.5-coder-0.5b-instruct-diffusion-mdlm": _QWEN2,
        "qwen3-0.6b-diffusion-bd3lm": replace(_QWEN3, kind="block_causal", block_length=32),
        "qwen2.5-coder-0.5b-instruct-diffusion-bd3lm": replace(_QWEN2, kind="block_causal", block_length=32),
        "a2d-tiny": tiny(_SMOLLM2),
        "a2d-blocks-tiny": tiny(_SMOLLM2, shift=0, **_BLOCKS),
        "a2d-blocks-shifted-tiny": tiny(_SMOLLM2, **_BLOCKS),
    },
)
