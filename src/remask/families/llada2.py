"""LLaDA2: block-causal diffusion with a mixture of experts, 2.0, 2.1 and 2.2, mini (16B-A1B) and flash (100B-A6B).

2.2 has the tensors of 2.1. Its files have `expert_capacity`: rows of a block choose their experts from one pool, groups
of experts have no effect, and two tokens delete and insert places.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.denoising.indel import EditTokens
from remask.families import qwen
from remask.families.family import Family, MixtureNames
from remask.families.fields import Fields
from remask.families.llada_moe import MASK
from remask.families.shapes import shapes_of
from remask.model.config import Mixture, ModelConfig, Router
from remask.request.sampling_params import SamplingDefaults

BLOCK = 32  # the published one; the published config.json names neither block nor mask
ROTARY_SHARE = 0.5  # default of `partial_rotary_factor` in the authors' class
SAMPLING_22 = SamplingDefaults(remasking="levenshtein")
_SWITCHES: Mapping[str, Any] = {"kind": "block_causal", "qk_norm": "head"}
_EDIT_TOKENS = ("delete_token_id", "split_token_id")  # keys of DELETE and INSERT


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape by a `config.json`, which is that of LLaDA2.2 if it has an `expert_capacity`."""
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
        block_length=fields.block("block_size", BLOCK),
        edit_tokens=_edit_tokens(fields, shape["vocab"], shape["mask_id"]) if pools else None,
        mixture=_mixture(fields, tuple(range(min(dense, shape["layers"])))),
        sampling=SAMPLING_22 if pools else SamplingDefaults(),
        **_SWITCHES,
        **shape,
    )


def _edit_tokens(fields: Fields, vocab_size: int, mask: int) -> EditTokens:
    """DELETE and INSERT. Raises `CheckpointError` unless they and the `mask` are three tokens."""
    delete, insert = (fields.token(key, vocab_size) for key in _EDIT_TOKENS)
    if len({delete, insert, mask}) < 3:
        raise fields.unfit("split_token_id", f"another token than DELETE, {delete}, and the mask, {mask}")
    return EditTokens(delete, insert)


def _mixture(fields: Fields, dense: tuple[int, ...]) -> Mixture:
    """The mixture of all layers but the `dense` ones. Shared experts are one that is as wide as all of them."""
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

_ROUTER_22 = replace(_ROUTER, groups=1, kept_groups=1, pool=48, block=BLOCK)
_SWITCHES_22: Mapping[str, Any] = {"edit_tokens": EditTokens(156930, 156931), "sampling": SAMPLING_22}


def _experts(width: int, router: Router) -> Mixture:
    return Mixture(experts=256, active=8, intermediate=width, shared=width, dense_layers=(0,), router=router)


def _few_experts(router: Router) -> Mixture:
    return Mixture(experts=8, active=2, intermediate=48, shared=48, dense_layers=(0,), router=router)


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
    # The files of 2.2-mini were not read: its experts are those of 2.1, its second end token is that of flash.
    presets=shapes_of(
        "llada2",
        {
            "llada2-mini": {"mixture": _experts(512, _ROUTER)},
            "llada2.1-mini": {"mixture": _experts(512, _ROUTER)},
            "llada2-flash": {"mixture": _experts(1024, _ROUTER)},
            "llada2.2-mini": {"mixture": _experts(512, _ROUTER_22), **_SWITCHES_22},
            "llada2.2-flash": {"mixture": _experts(1024, _ROUTER_22), **_SWITCHES_22},
            "llada2-tiny": {"mixture": _few_experts(replace(_ROUTER, groups=4, kept_groups=2)), "rotary_dim": 8},
            "llada2.2-tiny": {
                "mixture": _few_experts(replace(_ROUTER_22, pool=4, block=8)),
                "rotary_dim": 8,
                "edit_tokens": EditTokens(253, 254),
                "sampling": SAMPLING_22,
            },
        },
        rotary_dim=64,
        **_SWITCHES,
    ),
)
