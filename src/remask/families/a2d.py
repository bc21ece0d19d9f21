"""A2D (dLLM): a Llama, Qwen2 or Qwen3 whose causal mask was taken away, and which was trained to denoise.

Tensors are those of the base, whose sliding windows are open. Row p predicts the token at p; with `right_shift_logits`
it goes on predicting the next one, as SmolLM2 with the adapter that comes with remask does. With `block_size` the model
is block-causal, and blocks are counted from the end of the prompt (BD3LM). The two kinds have the same `config.json` as
published: the name of the folder tells them apart. This file follows the authors' code; no published checkpoint was
loaded.
"""

from collections.abc import Mapping
from typing import Any

from remask.families import qwen
from remask.families.family import Family
from remask.families.fields import Fields
from remask.families.shapes import shapes_of
from remask.model.config import ModelConfig
from remask.request.sampling_params import SamplingDefaults

LLAMA, QWEN2, QWEN3 = "a2d-llama", "a2d-qwen2", "a2d-qwen3"
SAMPLING = SamplingDefaults(schedule="linear", blocks_from_prompt=True, whole_blocks=False)
BLOCK = 32  # of the authors' evaluation


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json`, which is block-causal if it has a `block_size`."""
    base = str(raw.get("model_type", "")).casefold()
    fields = Fields(f"config.json ({base})", raw)
    fields.only("attention_bias", False, optional=True)
    head_dim = fields.integer("head_dim", least=2) if base == QWEN3 else fields.head_dim()
    block = fields.block("block_size")
    return ModelConfig(
        family="a2d",
        qkv_bias=base == QWEN2,
        qk_norm="head" if base == QWEN3 else None,
        shift=1 if fields.flag("right_shift_logits", False) else 0,
        kind="masked" if block is None else "block_causal",
        block_length=block,
        sampling=SAMPLING,
        **qwen.shape(fields, head_dim, windows=True),
    )


def _remark(name: str, config: ModelConfig) -> str | None:
    """A warning if the folder `name` says that the model is block-causal and its configuration does not."""
    if "-bd3lm-" not in f"{name}-".casefold() or config.block_length is not None:
        return None
    return (
        f"{name!r} is named as block-causal models are, and its config.json has no block_size, so every row sees all "
        f"others; if it was trained with blocks, pass --hf-overrides '{{\"block_size\": {BLOCK}}}'"
    )


_BLOCKS: Mapping[str, Any] = {"kind": "block_causal"}
_QWEN2: Mapping[str, Any] = {"qkv_bias": True}
_QWEN3: Mapping[str, Any] = {"qk_norm": "head"}
_SHIFTED: Mapping[str, Any] = {"shift": 1}

A2D = Family(
    name="a2d",
    model_types=(LLAMA, QWEN2, QWEN3),
    architectures=("A2DLlamaLMHeadModel", "A2DQwen2LMHeadModel", "A2DQwen3LMHeadModel"),
    names=qwen.HEAD_NORM_NAMES,
    config=_config,
    remark=_remark,
    harmless=frozenset({"layer_types", "use_sliding_window"}),
    # As Qwen3-0.6B and Qwen2.5-Coder-0.5B, with the first id behind their tokenizers' own as the mask.
    presets=shapes_of(
        "a2d",
        {
            "smollm2-135m": _SHIFTED,
            "qwen3-0.6b-diffusion-mdlm": _QWEN3,
            "qwen2.5-coder-0.5b-instruct-diffusion-mdlm": _QWEN2,
            "qwen3-0.6b-diffusion-bd3lm": {**_QWEN3, **_BLOCKS},
            "qwen2.5-coder-0.5b-instruct-diffusion-bd3lm": {**_QWEN2, **_BLOCKS},
            "a2d-tiny": _SHIFTED,
            "a2d-blocks-tiny": _BLOCKS,
            "a2d-blocks-shifted-tiny": {**_SHIFTED, **_BLOCKS},
        },
        sampling=SAMPLING,
    ),
)
