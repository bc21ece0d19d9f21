"""Which entry leaves the store first."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

from remask.checks.values import one_of

Eviction: TypeAlias = Literal["fifo", "lru"]
EVICTIONS: tuple[str, ...] = get_args(Eviction)


class EvictionOrder:
    """Keys in the order in which they would be evicted: "fifo" by insertion (BiCache appendix C), "lru" by last use."""

    def __init__(self, rule: Eviction) -> None:
        one_of("eviction", rule, EVICTIONS)
        self.rule = rule
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __iter__(self) -> Iterator[int]:
        """Keys, the next to be evicted first."""
        return iter(self._keys)

    def add(self, key: int) -> None:
        """Append a new key."""
        self._keys[key] = None

    def used(self, key: int) -> None:
        """Note that `key` was read. "lru" moves it to the end, "fifo" leaves it in place."""
        if self.rule == "lru":
            self._keys.move_to_end(key)

    def remove(self, key: int) -> None:
        """Remove `key`."""
        del self._keys[key]
