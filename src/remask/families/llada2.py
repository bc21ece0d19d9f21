"""LLaDA2: block-causal diffusion with a mixture of experts, 2.0, 2.1 and 2.2, mini (16B-A1B) and flash (100B-A6B).

2.2 has the tensors of 2.1. Its files have `expert_capacity`: rows of a block choose their experts from one pool, groups
of experts have no effect, and two tokens delete and insert places.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.denoising.indel import EditTokens
from remask.families import qwen
from remask.families.family import Family, MixtureNames, tiny
from remask.families.fields import Fields
from remask.families.llada_moe import END, MASK
from remask.model.config import Mixture, ModelConfig, Router
from remask.request.sampling_params import SamplingDefaults

BLOCK = 32  # the published one; the published config.json names neither block nor mask
ROTARY_SHARE = 0.5  # default of `partial_rotary_factor` in the authors' class
SAMPLING_22 = SamplingDefaults(remasking="levenshtein")
_EDIT_TOKENS = ("delete_token_id", "split_token_id")


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields("config.json (llada2)", raw, mask_token_id=MASK)
    fields.only("hidden_act", "silu", optional=True)
    for key in ("use_bias", "use_qkv_bias", "norm_head", "using_split_qkv_in_self_attention"):
        fields.only(key, False, optional=True)
    for key in ("use_qk_norm", "use_rmsnorm", "norm_topk_prob"):
        fields.only(key, True, optional=True)
    fields.only("score_function", "sigmoid")
    fields.only("router_dtype", "fp32", optional=True)
    dense = fields.integer("first_k_dense_replace", 0, least=0)
    pools = bool(fields.get("expert_capacity"))
    shape = fields.shape(
        fields.integer("head_dim", least=2),
        width_key="intermediate_size" if dense else None,
        share=ROTARY_SHARE,
        nested_leads=pools,
    )
    shape["stop_ids"] = shape["stop_ids"] or fields.tokens("pad_token_id", shape["vocab"])
    return ModelConfig(
        family="llada2",
        kind="block_causal",
        qk_norm="head",
        block_length=fields.block("block_size", BLOCK),
        edit_tokens=_edit_tokens(fields, shape["vocab"], shape["mask_id"]) if pools else None,
        mixture=_mixture(fields, tuple(range(min(dense, shape["layers"])))),
        sampling=SAMPLING_22 if pools else SamplingDefaults(),
        **shape,
    )


def _edit_tokens(fields: Fields, vocab_size: int, mask: int) -> EditTokens:
    delete, insert = (fields.token(key, vocab_size) for key in _EDIT_TOKENS)
    if len({delete, insert, mask}) < 3:
        raise fields.unfit("split_token_id", f"another token than DELETE, {delete}, and the mask, {mask}")
    return EditTokens(delete, insert)


def _mixture(fields: Fields, dense: tuple[int, ...]) -> Mixture:
    experts = fields.experts()
    choice, choosable = _expert_choice(fields, experts)
    active = fields.integer("num_experts_per_tok", most=choosable)
    width = fields.integer("moe_intermediate_size")
    return Mixture(
        experts=experts,
        active=active,
        intermediate=width,
        shared=width * fields.integer("num_shared_experts", 0, least=0),
        dense_layers=dense,
        router=Router(
            score="sigmoid",
            bias=fields.flag("moe_router_enable_expert_bias", False),
            normalise=active > 1,
            scale=fields.number("routed_scaling_factor"),
            float32=True,
            **choice,
        ),
    )


def _expert_choice(fields: Fields, experts: int) -> tuple[dict[str, int], int]:
    """The fields of a `Router` that limit which experts a row chooses from, and the number of these experts."""
    if fields.get("expert_capacity"):  # the published files also have groups, which have no effect
        pool = fields.integer("expert_capacity", most=experts)
        return {"pool": pool, "block": fields.block("block_size", BLOCK) or BLOCK}, pool
    for key in _EDIT_TOKENS:
        if fields.get(key) is not None:
            raise fields.unfit(key, "this key only together with 'expert_capacity', as in LLaDA2.2")
    groups = fields.integer("n_group", 1)
    kept_groups = fields.integer("topk_group", 1, most=groups)
    if experts % groups or experts // groups < 2:
        raise fields.unfit("n_group", f"a divisor of the {experts} experts that leaves two or more in a group")
    return {"groups": groups, "kept_groups": kept_groups}, experts // groups * kept_groups


_ROUTER = Router("sigmoid", bias=True, groups=8, kept_groups=4, normalise=True, scale=2.5, float32=True)

_LLADA2_MINI = ModelConfig(
    family="llada2",
    layers=20,
    hidden=2048,
    heads=16,
    kv_heads=4,
    head_dim=128,
    intermediate=5120,
    vocab=157184,
    max_length=16384,
    rope_theta=600_000.0,
    norm_eps=1e-6,
    mask_id=MASK,
    stop_ids=(END,),
    kind="block_causal",
    qk_norm="head",
    rotary_dim=64,
    block_length=BLOCK,
    mixture=Mixture(experts=256, active=8, intermediate=512, shared=512, dense_layers=(0,), router=_ROUTER),
)

_LLADA2_FLASH = replace(
    _LLADA2_MINI,
    layers=32,
    hidden=4096,
    heads=32,
    intermediate=9216,
    mixture=Mixture(experts=256, active=8, intermediate=1024, shared=1024, dense_layers=(0,), router=_ROUTER),
)

_LLADA2_TINY = tiny(
    _LLADA2_MINI,
    rotary_dim=8,
    block_length=8,
    mixture=Mixture(
        experts=8,
        active=2,
        intermediate=48,
        shared=48,
        dense_layers=(0,),
        router=replace(_ROUTER, groups=4, kept_groups=2),
    ),
)

_ROUTER_22 = replace(_ROUTER, groups=1, kept_groups=1, pool=48, block=BLOCK)


def _pooled_shape(config: ModelConfig, router: Router, **changes: Any) -> ModelConfig:
    """The shape of 2.2 for a shape of 2.1."""
    assert config.mixture is not None
    mixture = replace(config.mixture, router=router)
    return replace(config, mixture=mixture, sampling=SAMPLING_22, **changes)


# The files of mini were not read: widths of its feed-forwards are those of 2.1, its second end token is that of flash.
_LLADA22: Mapping[str, Any] = {
    "max_length": 131072,
    "rope_theta": 3_000_000.0,
    "stop_ids": (END, 156900),
    "edit_tokens": EditTokens(156930, 156931),
}

LLADA2 = Family(
    name="llada2",
    model_types=("llada2_moe",),
    architectures=("LLaDA2MoeModelLM",),
    names=replace(
        qwen.NAMES,
        embed="model.word_embeddings",
        q=None,
        k=None,
        v=None,
        qkv="attention.query_key_value",
        out="attention.dense",
        q_norm="attention.query_layernorm",
        k_norm="attention.key_layernorm",
        mixture=MixtureNames(bias="mlp.gate.expert_bias", shared="mlp.shared_experts."),
    ),
    config=_config,
    harmless=frozenset({"n_group", "topk_group"}),
    presets={
        "llada2-mini": _LLADA2_MINI,
        "llada2.1-mini": _LLADA2_MINI,
        "llada2-flash": _LLADA2_FLASH,
        "llada2.2-mini": _pooled_shape(_LLADA2_MINI, _ROUTER_22, **_LLADA22),
        "llada2.2-flash": _pooled_shape(_LLADA2_FLASH, _ROUTER_22, **_LLADA22),
        "llada2-tiny": _LLADA2_TINY,
        "llada2.2-tiny": _pooled_shape(
            _LLADA2_TINY, replace(_ROUTER_22, pool=4, block=8), edit_tokens=EditTokens(253, 254), stop_ids=(250, 251)
        ),
    },
)
