"""The names of the ways to share prefixes and to find them."""

from typing import Literal, TypeAlias, get_args

PrefixMatch: TypeAlias = Literal["exact", "longest"]
PREFIX_MATCHES: tuple[str, ...] = get_args(PrefixMatch)
PrefixSharing: TypeAlias = Literal["off", "exact", "auto"]
PREFIX_SHARINGS: tuple[str, ...] = get_args(PrefixSharing)
