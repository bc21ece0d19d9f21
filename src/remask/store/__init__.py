"""Page accounting and the store of shared prefixes. Here are the names of its rules."""

from typing import Literal, TypeAlias, get_args

PrefixMatch: TypeAlias = Literal["exact", "longest"]
PREFIX_MATCHES: tuple[str, ...] = get_args(PrefixMatch)
PrefixSharing: TypeAlias = Literal["off", "exact", "auto"]
PREFIX_SHARINGS: tuple[str, ...] = get_args(PrefixSharing)
Eviction: TypeAlias = Literal["fifo", "lru"]
EVICTIONS: tuple[str, ...] = get_args(Eviction)
