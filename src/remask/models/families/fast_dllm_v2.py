"""Fast-dLLM v2: block-causal diffusion on the dense Qwen2.5 architecture.

Written from public descriptions of the model. The names of its configuration's keys were not checked against a
checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from remask.models.config import ModelConfig
from remask.models.families.dream import DREAM
from remask.models.families.family import Family
from remask.models.families.fields import Fields
from remask.models.families.qwen import rope_theta

MASK, END_OF_TURN = 151665, 151645
BLOCK = 32


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (fast-dllm-v2)", raw)
    fields.only("hidden_act", "silu", optional=True)
    fields.only("use_sliding_window", False, optional=True)
    vocab = fields.integer("vocab_size")
    heads, head_dim = fields.integer("num_attention_heads"), fields.head_dim("hidden_size", "num_attention_heads")
    mask = MASK if raw.get("mask_token_id") is None else fields.token("mask_token_id", vocab)
    stops = fields.tokens("eos_token_id", vocab)
    if mask == MASK:
        stops += (END_OF_TURN,)
    return ModelConfig(
        family="fast-dllm-v2",
        layers=fields.integer("num_hidden_layers"),
        hidden=fields.integer("hidden_size"),
        heads=heads,
        kv_heads=fields.kv_heads("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=vocab,
        max_length=fields.integer("max_position_embeddings"),
        rope_theta=rope_theta(fields, raw),
        norm_eps=fields.number("rms_norm_eps"),
        mask_id=mask,
        stop_ids=tuple(dict.fromkeys(stops)),
        qkv_bias=True,
        tied=fields.flag("tie_word_embeddings", False),
        shift=1,
        kind="block_causal",
        block_length=fields.integer("bd_size", BLOCK),
    )


FAST_DLLM_V2 = Family(
    name="fast-dllm-v2",
    model_types=("Fast_dLLM_Qwen",),
    architectures=("Fast_dLLM_QwenForCausalLM",),
    names=DREAM.names,  # both are Qwen2.5's
    config=_config,
)
