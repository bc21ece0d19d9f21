"""The kinds of diffusion models: what is noise, and what a row may attend to."""

from typing import Literal, TypeAlias, get_args

ModelKind: TypeAlias = Literal["masked", "uniform", "block_causal"]
"""`masked`: the response starts as masks, attention is fully bidirectional (LLaDA, Dream). `uniform`: any token of the
current block may change at any step, and clean rows do not see noise (GIDD, whatever the mix of its noise), unless the
model was trained without structured attention.
`block_causal`: a row attends to its own block and all before it (SDAR)."""

KINDS: tuple[ModelKind, ...] = get_args(ModelKind)


def in_words(kinds: tuple[ModelKind, ...]) -> str:
    """The kinds as errors and documentation name them, such as "masked and block-causal"."""
    return " and ".join(kind.replace("_", "-") for kind in kinds)
