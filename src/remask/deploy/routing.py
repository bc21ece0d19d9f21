"""Chooses the replica of a request: rendezvous hashing of its prefix, with spill-over from overloaded replicas.

In rendezvous hashing (Thaler and Ravishankar 1998) every replica has a score for every prefix, and the highest score
wins. A replica that joins or leaves moves only the prefixes that it wins, 1/n of all. The load limit comes from
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018): a factor above the mean load.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from remask.checks.values import real, whole


def rank(identity: bytes, replicas: Iterable[str]) -> list[str]:
    """Return `replicas` in the order in which they should hold the prefix. Their given order does not matter."""
    return sorted(replicas, key=lambda replica: (-_score(identity, replica), replica))


def _score(identity: bytes, replica: str) -> int:
    name = replica.encode()
    return int(xxhash.xxh64(len(name).to_bytes(4, "little") + name + identity).intdigest())


@dataclass(frozen=True, slots=True)
class Spill:
    """The rule by which a replica counts as overloaded.

    Attributes:
        slots: requests that a replica runs at a time; with fewer open requests it is never overloaded.
        balance: open requests that a replica may have, as a multiple of the mean over all; above 1.

    Raises `ConfigError` on values out of range.
    """

    slots: int = 8
    balance: float = 1.25

    def __post_init__(self) -> None:
        whole("slots", self.slots, low=1)
        real("balance", self.balance, low=1.0, above=True)

    def limit(self, loads: Mapping[str, int]) -> int:
        """Return the most open requests that a replica may have, the request to be placed included."""
        return max(self.slots, math.ceil(self.balance * (sum(loads.values()) + 1) / len(loads)))

    def order(self, identity: bytes | None, loads: Mapping[str, int]) -> list[str]:
        """Return all replicas, the best one for the request first. `loads` maps replicas to their open requests.

        Replicas that are not overloaded come before overloaded ones, both in the order of `rank`. For a request
        without a prefix the order is that of the loads; equal loads keep the order of `loads`.
        """
        if identity is None:
            return sorted(loads, key=lambda replica: loads[replica])
        limit = self.limit(loads) if loads else 0
        return sorted(rank(identity, loads), key=lambda replica: loads[replica] >= limit)
