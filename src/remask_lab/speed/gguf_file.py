"""A GGUF file of the `llada` architecture with given weights, as llama.cpp lays it out."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from remask.errors import ConfigError
from remask.model.config import ModelConfig
from remask.model.weights import Weights

TYPES = ("f32", "q8_0", "q4_0")
_BYTES = 256


def write_gguf(path: Path, config: ModelConfig, weights: Weights, kind: str) -> None:
    """Write `weights`, float32 on the CPU, with matrices of the type `kind`, and a vocabulary of bytes and fillers.

    Raises `ConfigError` where `config` is not of the `llada` family, or has fewer than 256 tokens.
    """
    if config.family != "llada" or config.vocab < _BYTES:
        raise ConfigError(f"files are written of llada models with {_BYTES} tokens or more, and not of {config.family}")
    writer = gguf.GGUFWriter(path, "llada")
    _write_keys(writer, config)
    _write_tokenizer(writer, config)
    quantised = getattr(GGMLQuantizationType, kind.upper())

    def add(name: str, values: NDArray[np.float32]) -> None:
        matrix = values.ndim == 2
        writer.add_tensor(
            f"{name}.weight",
            gguf.quantize(values, quantised) if matrix else values,
            raw_dtype=quantised if matrix else None,
        )

    add("token_embd", weights.embed.numpy())
    add("output_norm", weights.norm.numpy())
    if not config.tied:
        add("output", weights.head.numpy())
    q, kv, wide = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate
    for number, layer in enumerate(weights.layers):
        qkv, both = layer.qkv.numpy(), layer.gate_up.numpy()
        for name, values in {
            "attn_norm": layer.attn_norm.numpy(),
            "attn_q": _in_pairs(qkv[:q], config.heads),
            "attn_k": _in_pairs(qkv[q : q + kv], config.kv_heads),
            "attn_v": qkv[q + kv :],
            "attn_output": layer.out.numpy(),
            "ffn_norm": layer.ffn_norm.numpy(),
            "ffn_gate": both[:wide],
            "ffn_up": both[wide:],
            "ffn_down": layer.down.numpy(),
        }.items():
            add(f"blk.{number}.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of two halves of each head, as pairs that RoPE turns together."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))


def _write_keys(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_name("random weights")
    writer.add_vocab_size(config.vocab)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_causal_attention(False)
    writer.add_bool("diffusion.shift_logits", False)


def _write_tokenizer(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Bytes in GPT-2's alphabet, and names for the rest of the vocabulary, which no text is made of."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(_BYTES, 2 * _BYTES))
    tokens = [chr(byte if byte in printable else next(others)) for byte in range(_BYTES)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"filler{number}" for number in range(_BYTES, config.vocab))])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * config.vocab)
    writer.add_token_merges(["a b"])  # the writer leaves out empty lists
    writer.add_eos_token_id(config.stop_ids[0])
    writer.add_pad_token_id(config.stop_ids[0])
    writer.add_mask_token_id(config.mask_id)
