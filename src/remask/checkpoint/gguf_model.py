"""The model in a GGUF file: its keys as the object that `config.json` of the same model has.

Keys and tensor names are those of llama.cpp's files. The families check the object like that of a folder.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remask.checkpoint.gguf_header import Header, List, StoredTensor
from remask.errors import CheckpointError
from remask.families.family import MixtureNames, TensorNames
from remask.families.fields import EXPERTS, LAYERS, ORIGINAL, VOCAB, Fields
from remask.families.llada import SWITCHES

EXPERT = "expert.{}."
"""Prefix of our names of one expert's matrices; the file has those of all experts in one tensor."""

ROPE_FACTORS = "rope_freqs.weight"
"""The factor by which each pair of channels turns slower (Llama 3.1 and later); it is read as `rope_scaling`."""

# Further keys of YaRN, with their names in `config.json`.
_YARN = {"original_context_length": ORIGINAL, "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
# Supported values of keys for the factor of cosines and sines, which programs interpret differently otherwise.
_YARN_GAINS = {"attn_factor": 1, "yarn_attn_factor": 1, "yarn_ext_factor": 1, "yarn_log_multiplier": 0}
_TOLERANCE = 1e-5  # tolerance of shares that are computed from float32

NAMES = TensorNames(
    embed="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{}.",
    attn_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    out="attn_output",
    ffn_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    mixture=MixtureNames(
        router="ffn_gate_inp", expert=EXPERT, gate="ffn_gate_exps", up="ffn_up_exps", down="ffn_down_exps"
    ),
)


@dataclass(frozen=True, slots=True)
class _Architecture:
    """The differences of files of one `general.architecture`."""

    constants: Mapping[str, Any]  # keys of `config.json` that such files lack
    # Names in `config.json` of layers, hidden size, heads, K/V heads, positions and tied embeddings, in this order
    keys: tuple[str, str, str, str, str, str]
    shift: bool = False  # the row before a position predicts it
    width_key: str | None = None  # name of the width of a dense layer's feed-forward; None: all layers have experts
    interleaved: bool = False  # rows of Q and K are adjacent RoPE pairs, not two halves of each head
    has_head_dim: bool = False  # there is a key for the width of a head


_QWEN_KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    "tie_word_embeddings",
)  # fmt: skip
_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llada": _Architecture(
        constants={"model_type": "llada", **SWITCHES},
        keys=("n_layers", "d_model", "n_heads", "n_kv_heads", "max_sequence_length", "weight_tying"),
        width_key="mlp_hidden_size",
        interleaved=True,
    ),
    "dream": _Architecture({"model_type": "Dream"}, _QWEN_KEYS, shift=True, width_key="intermediate_size"),
    "llada-moe": _Architecture({"model_type": "llada_moe"}, _QWEN_KEYS),
    # No diffusion models, unless overrides of their keys make them ones.
    "llama": _Architecture({"model_type": "llama"}, _QWEN_KEYS, width_key="intermediate_size", interleaved=True),
    "qwen2": _Architecture({"model_type": "qwen2"}, _QWEN_KEYS, width_key="intermediate_size"),
    "qwen3": _Architecture({"model_type": "qwen3"}, _QWEN_KEYS, width_key="intermediate_size", has_head_dim=True),
}


def config_object(header: Header) -> dict[str, Any]:
    """The equivalent of `config.json` for the model in a file.

    Raises `CheckpointError`, naming file, key and value, if a key is missing or has a value that cannot be used.
    """
    fields = _fields(header)
    arch = _architecture(header)
    architecture = _ARCHITECTURES[arch]
    if header.values.get("split.count", 1) not in (0, 1):
        raise fields.unfit("split.count", "1: a model in one file (merge the parts with llama.cpp's gguf-split)")
    fields.only(f"{arch}.attention.causal", False, optional=True)
    fields.only("diffusion.shift_logits", architecture.shift, optional=True)
    scaling = _scaling(fields, arch)
    hidden_key, heads_key = f"{arch}.embedding_length", f"{arch}.attention.head_count"
    if architecture.has_head_dim:
        dim = fields.integer(f"{arch}.attention.key_length", least=2)
    else:
        dim = fields.head_dim(hidden_key, heads_key)
    heads = fields.integer(heads_key)
    for key in ("key_length", "value_length"):
        fields.only(f"{arch}.attention.{key}", dim, optional=True)
    layers = fields.integer(f"{arch}.block_count", most=LAYERS)
    vocab = fields.integer(f"{arch}.vocab_size", _token_count(header), most=VOCAB)
    eos = fields.tokens("tokenizer.ggml.eos_token_id", vocab) + fields.tokens("tokenizer.ggml.eot_token_id", vocab)
    kv_heads = fields.kv_heads(f"{arch}.attention.head_count_kv", heads)
    positions = fields.integer(f"{arch}.context_length")
    shape = (layers, fields.integer(hidden_key), heads, kv_heads, positions, "output.weight" not in header.tensors)
    raw = {
        **architecture.constants,
        **dict(zip(architecture.keys, shape, strict=True)),
        "vocab_size": vocab,
        "rope_theta": fields.number(f"{arch}.rope.freq_base"),
        "rms_norm_eps": fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "eos_token_id": list(dict.fromkeys(eos)),
        **({"head_dim": dim} if architecture.has_head_dim else {}),
    }
    llama3_scaling = _llama3_scaling(header, raw["rope_theta"], dim)
    if scaling and llama3_scaling:
        raise fields.unfit(f"{arch}.rope.scaling.type", f'"none" beside the tensor {ROPE_FACTORS!r}')
    if scaling or llama3_scaling:
        raw["rope_scaling"] = scaling or llama3_scaling
    # LLaDA-MoE has a mask of its own, and causal models have none.
    has_mask = header.values.get("tokenizer.ggml.mask_token_id") is not None
    if has_mask or arch not in ("llada-moe", "llama", "qwen2", "qwen3"):
        raw["mask_token_id"] = fields.token("tokenizer.ggml.mask_token_id", vocab)
    rotary_dim = fields.integer(f"{arch}.rope.dimension_count", dim, most=dim)
    if architecture.width_key is not None:
        fields.only(f"{arch}.rope.dimension_count", dim, optional=True)
        return raw | {architecture.width_key: fields.integer(f"{arch}.feed_forward_length")}
    raw |= {"moe_layer_freq": [1] * layers, "partial_rotary_factor": rotary_dim / dim}
    return raw | {"qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors} | _expert_keys(fields, arch)


def _expert_keys(fields: Fields, arch: str) -> dict[str, Any]:
    """The numbers and the width of experts, as `config.json` has them. Raises `CheckpointError` on shared experts."""
    experts = fields.integer(f"{arch}.expert_count", most=EXPERTS)
    fields.only(f"{arch}.expert_shared_count", 0, optional=True)
    fields.only(f"{arch}.leading_dense_block_count", 0, optional=True)
    return {
        "num_experts": experts,
        "num_experts_per_tok": fields.integer(f"{arch}.expert_used_count", most=experts),
        "expert_intermediate_size": fields.integer(f"{arch}.expert_feed_forward_length"),
    }


def _scaling(fields: Fields, arch: str) -> dict[str, Any] | None:
    """The equivalent of `rope_scaling`, or None. Without a type the scaling is linear, as in llama.cpp."""
    key = f"{arch}.rope.scaling."
    kind = fields.get(key + "type")
    factor_key = key + "factor"
    if kind is None and fields.get(factor_key) is None:
        factor_key = f"{arch}.rope.scale_linear"
    if arch == "llada" and kind is None:
        fields.only(factor_key, 1, optional=True)
    supported = ("none",) if arch == "llada" else ("none", "linear", "yarn")
    if kind not in (None, *supported):
        raise fields.unfit(key + "type", ", ".join(supported))
    if kind == "none" or (kind is None and fields.number(factor_key, 1) == 1):
        return None
    scaling = {"rope_type": kind or "linear", "factor": fields.number(factor_key)}
    if kind != "yarn":
        return scaling
    for name, neutral in _YARN_GAINS.items():
        fields.only(key + name, neutral, optional=True)
    return scaling | {config_key: fields.get(key + name) for name, config_key in _YARN.items()}


def _llama3_scaling(header: Header, theta: float, dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of Llama 3.1, from the tensor `ROPE_FACTORS`. Returns None if it scales nothing.

    The share of a pair's frequency that is not slowed grows linearly with the frequency, so two pairs that are partly
    slowed give both bounds. Raises `CheckpointError` if the tensor is not of this form.
    """
    tensor = factors_tensor(header)
    if tensor is None:
        return None
    factors = _vector(header, tensor)
    turns = theta ** (-np.arange(0, dim, 2) / dim) / math.tau  # of each pair, per position
    fits = factors.shape == turns.shape and np.isfinite(factors).all() and factors.min() >= 1
    if fits and factors.max() == 1:
        return None
    scaling = _fit_llama3(factors, turns) if fits else None
    if scaling is None:
        raise CheckpointError(
            f"{header.file}: the tensor {ROPE_FACTORS!r} {list(factors.shape)} slows pairs of channels otherwise than "
            "Llama 3.1 does, or too few of them to tell. Load the checkpoint that the file was made of."
        )
    return scaling


def _fit_llama3(factors: NDArray[np.float64], turns: NDArray[np.float64]) -> dict[str, Any] | None:
    """The keys that give `factors` for pairs with `turns` turns per position. Returns None if there are none."""
    slowest = float(factors.max())
    shares = (1 / factors - 1 / slowest) / (1 - 1 / slowest)  # the share of each frequency that is not slowed
    is_mixed = (shares > _TOLERANCE) & (shares < 1 - _TOLERANCE)
    if is_mixed.sum() < 2:
        return None
    slope, start = np.polyfit(turns[is_mixed], shares[is_mixed], 1)
    if slope <= 0 or start >= 0:
        return None
    # Only the ratios of length and bounds are known; the lower bound of published models is 1.
    length = max(1, round(-slope / start))
    low, high = (float(f"{(share - start) * length / slope:.6g}") for share in (0, 1))
    if not np.allclose(((turns * length - low) / (high - low)).clip(0, 1), shares, atol=100 * _TOLERANCE):
        return None
    names = ("rope_type", "factor", ORIGINAL, "low_freq_factor", "high_freq_factor")
    return dict(zip(names, ("llama3", float(f"{slowest:.6g}"), length, low, high), strict=True))


def factors_tensor(header: Header) -> StoredTensor | None:
    """The tensor `ROPE_FACTORS`, which is not a weight. Returns None if there is none that llama.cpp reads."""
    return header.tensors.get(ROPE_FACTORS) if _architecture(header) == "llama" else None


def _vector(header: Header, tensor: StoredTensor) -> NDArray[np.float64]:
    """The numbers of a tensor of one dimension. Raises `CheckpointError` if it is not float32 or has more."""
    if tensor.ggml_type.name != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(
            f"{header.file}: the tensor {ROPE_FACTORS!r} is {tensor.ggml_type.name} {list(tensor.shape)}; supported: a "
            "row of F32."
        )
    with header.file.open("rb") as file:
        return np.fromfile(file, np.float32, tensor.shape[0], offset=tensor.offset).astype(float)


def interleaved_heads(header: Header, name: str) -> int | None:
    """The number of heads of the tensor `name` if its rows are adjacent RoPE pairs, as llama.cpp stores Q and K.

    Returns None if they are in the half-split order of the transformer: channel j of a head is paired with j + Dh / 2.
    """
    arch = _architecture(header)
    projection = name.rpartition(".")[0].rpartition(".")[2]  # the last part of the name before ".weight" or ".bias"
    if projection not in (NAMES.q, NAMES.k) or not _ARCHITECTURES[arch].interleaved:
        return None
    fields = _fields(header)
    heads = fields.integer(f"{arch}.attention.head_count")
    return heads if projection == NAMES.q else fields.kv_heads(f"{arch}.attention.head_count_kv", heads)


def _fields(header: Header) -> Fields:
    """The keys of a header, for checks. Arrays are replaced by texts that describe them in errors."""
    values = header.values.items()
    raw = {key: f"array of {value.count}" if isinstance(value, List) else value for key, value in values}
    return Fields(str(header.file), raw)


def _architecture(header: Header) -> str:
    """`general.architecture`, the prefix of other keys. Raises `CheckpointError` if it is not supported."""
    arch = header.values.get("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        error: CheckpointError = _fields(header).unfit("general.architecture", ", ".join(_ARCHITECTURES))
        raise error
    return arch


def _token_count(header: Header) -> int | None:
    """The size of the vocabulary. Returns None if the file has none."""
    tokens = header.values.get("tokenizer.ggml.tokens")
    return tokens.count if isinstance(tokens, List) else None
