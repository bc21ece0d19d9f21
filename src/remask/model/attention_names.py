"""The names of the ways to compute attention. All of them run the same work lists."""

from typing import Literal, TypeAlias, get_args

AttentionName: TypeAlias = Literal["auto", "torch", "triton", "numpy"]
ATTENTIONS: tuple[str, ...] = get_args(AttentionName)
