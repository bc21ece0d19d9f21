"""Checks of what users give: values, declared fields, names of plug-ins; and the names that users choose among."""

from typing import Literal, TypeAlias, get_args

ModelKind: TypeAlias = Literal["masked", "uniform", "block_causal"]
"""`masked`: the response starts as masks, attention is fully bidirectional (LLaDA, Dream). `uniform`: any token of the
current block may change at any step, and clean rows do not see noise (GIDD, whatever the mix of its noise), unless the
model was trained without structured attention.
`block_causal`: a row attends to its own block and all before it (SDAR)."""

KINDS: tuple[ModelKind, ...] = get_args(ModelKind)

Quantization: TypeAlias = Literal["int8", "int4", "fp8"]  # the number formats that weights can be quantized to
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
CPU_QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")
QuantizationChoice: TypeAlias = Quantization | Literal["auto", "none"] | None
"""What users may ask for; see `ModelSettings.quantization`."""

AttentionName: TypeAlias = Literal["auto", "torch", "triton", "numpy"]
"""The ways to compute attention. All of them run the same work lists."""
ATTENTIONS: tuple[str, ...] = get_args(AttentionName)

BUNDLED, BUNDLED_TARIFF = "bundled", "bundled-tariff"
BUNDLED_TRANSIT, BUNDLED_UNIFORM = "bundled-transit", "bundled-uniform"
# Adapters of one base, whose weights are in a package of their own.
SMOLLM2, SMOLLM2_BLOCKS = "smollm2", "smollm2-blocks"
BUNDLED_MODELS = (SMOLLM2, SMOLLM2_BLOCKS, BUNDLED, BUNDLED_TARIFF, BUNDLED_TRANSIT, BUNDLED_UNIFORM)


def in_words(kinds: tuple[ModelKind, ...]) -> str:
    """The kinds as errors and documentation name them, such as "masked and block-causal"."""
    return " and ".join(kind.replace("_", "-") for kind in kinds)
