"""Which replica gets a request: rendezvous hashing of its prefix, with spill-over from loaded replicas.

Rendezvous hashing (Thaler and Ravishankar 1998): every replica has a score for every prefix, and the highest wins. A
replica that joins or leaves moves the prefixes that it wins or won, 1/n of all, and no others. The limit on the load of
one is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018): a factor above the mean.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from remask.core.checks import real, whole


def rank(identity: bytes, replicas: Iterable[str]) -> list[str]:
    """`replicas` in the order in which they should hold the prefix, whatever order they are given in."""
    return sorted(replicas, key=lambda replica: (-_score(identity, replica), replica))


def _score(identity: bytes, replica: str) -> int:
    name = replica.encode()
    return int(xxhash.xxh64(len(name).to_bytes(4, "little") + name + identity).intdigest())


@dataclass(frozen=True, slots=True)
class Spill:
    """When a replica counts as loaded.

    Attributes:
        slots: requests that a replica runs at a time; below so many open ones it is never loaded.
        balance: open requests that a replica may have, as a multiple of the mean over all; above 1.

    Raises `ConfigError` on values out of range.
    """

    slots: int = 8
    balance: float = 1.25

    def __post_init__(self) -> None:
        whole("slots", self.slots, low=1)
        real("balance", self.balance, low=1.0, above=True)

    def limit(self, loads: Mapping[str, int]) -> int:
        """Open requests that a replica may have, the one to be placed included."""
        return max(self.slots, math.ceil(self.balance * (sum(loads.values()) + 1) / len(loads)))

    def order(self, identity: bytes | None, loads: Mapping[str, int]) -> list[str]:
        """All replicas, the one that should get the request first. `loads` are their open requests.

        The first by `rank` that is not loaded comes first, then the others that are not, then the loaded ones. A
        request without a prefix goes to the least loaded, of equals to the first in `loads`.
        """
        if identity is None:
            return sorted(loads, key=lambda replica: loads[replica])
        limit = self.limit(loads) if loads else 0
        return sorted(rank(identity, loads), key=lambda replica: loads[replica] >= limit)
