"""A stored prefix, and its description for an operator."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from remask.store.pages import PageRange


@dataclass(slots=True)
class PrefixEntry:
    """One shared prefix, identified by all of its tokens and its salt. `ready` once its prefix-only pass has run."""

    key: int
    tokens: tuple[int, ...]
    extent: PageRange
    states: Tensor  # [layers - 1, tokens, D]: states[l] leaves layer l; no layer restarts from the last one's
    ready: bool = False
    leases: int = 0
    hits: int = 0
    cache_salt: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def holds(self, tokens: Sequence[int], cache_salt: str) -> bool:
        """Whether this is the entry of exactly these tokens, for requests of this salt."""
        return self.cache_salt == cache_salt and np.array_equal(self.tokens, np.asarray(tokens))


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """An entry as an operator sees it, without its tokens and its salt.

    Attributes:
        id: its key in hexadecimal, as `PrefixStore.drop` takes it once read by `int(id, 16)`.
        tokens: length of the prefix.
        layers: layers whose K/V are kept.
        bytes: K/V pages in all layers, unused slots of the last page included, and boundary states.
        hits: requests that read it without having run its pass.
        leases: running requests that read it.
        ready: whether its prefix-only pass has run.
    """

    id: str
    tokens: int
    layers: int
    bytes: int
    hits: int
    leases: int
    ready: bool
