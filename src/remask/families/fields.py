"""Typed access to the keys of a checkpoint's configuration. Errors name the key, its value and what is supported."""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from remask.checks.values import SHOWN, is_real, is_whole
from remask.errors import CheckpointError

# The largest sizes that a configuration may name. They are far above every published model's, and small enough that
# what the loader lists or allocates before it has seen a tensor stays small.
SIZE = 2**20
"""Of whatever has no bound of its own: positions, and the widths and heads of a layer."""
LAYERS = 2**12
VOCAB = 2**24
"""Token ids below it are exact in float32, in which the sampler hands them over."""
EXPERTS = 2**12
"""Routed experts of a layer."""
BLOCK = 2**10
"""Of a block-causal model's blocks, as pages hold whole blocks."""


def _shown(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


class Fields:
    """The keys of one JSON object, which is named `where` in errors. `null` counts as absent.

    All methods raise `CheckpointError` on values that cannot be used.
    """

    def __init__(self, where: str, raw: Mapping[str, Any]) -> None:
        self._where = where
        self._raw = raw

    def unfit(self, key: str, supported: str) -> CheckpointError:
        """The error for a key whose value cannot be used. `supported` describes the values that can."""
        if self._raw.get(key) is None:
            return CheckpointError(f"{self._where}: the key {key!r} is missing; supported: {supported}.")
        return CheckpointError(f"{self._where}: {key!r} is {_shown(self._raw[key])}; supported: {supported}.")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = SIZE) -> int:
        """A whole number from `least` to `most`. Where the key is absent: `default`, or an error without one."""
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if not is_whole(value, least, most):
            raise self.unfit(key, f"an integer from {least} to {most}")
        return value

    def number(self, key: str) -> float:
        """A positive, finite number."""
        value = self._raw.get(key)
        if not is_real(value, 0) or value == 0:
            raise self.unfit(key, "a positive, finite number")
        return float(value)

    def real(self, key: str) -> float:
        """A finite number of either sign."""
        value = self._raw.get(key)
        if not is_real(value, -math.inf):
            raise self.unfit(key, "a finite number")
        return float(value)

    def scaling(self, key: str) -> float | Literal["fan_in", "fan_out"]:
        """Scale of linear layers: "fan_in", "fan_out", or a positive number."""
        value = self._raw.get(key)
        if value == "fan_in" or value == "fan_out":
            return "fan_in" if value == "fan_in" else "fan_out"
        if isinstance(value, str):
            raise self.unfit(key, '"fan_in", "fan_out" or a positive number')
        return self.number(key)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false. Where the key is absent: `default`, or an error without one."""
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.unfit(key, "true or false")
        return value

    def only(self, key: str, supported: object, *, optional: bool = False) -> None:
        """Refuse every value of `key` but one, for switches that the transformer does not have.

        An `optional` key may be absent, which means the supported value.
        """
        value = self._raw.get(key)
        if not (value == supported or (value is None and optional)):
            raise self.unfit(key, f"{_shown(supported)} (the transformer has no other form of it)")

    def token(self, key: str, vocab: int, default: int | None = None) -> int:
        """A token id of a vocabulary of `vocab` ids. Where the key is absent: `default`, or an error without one."""
        value = self._raw.get(key)
        value = default if value is None else value
        if not is_whole(value, 0, vocab - 1):
            raise self.unfit(key, f"a token id below {vocab}, the vocabulary's size")
        return value

    def tokens(self, key: str, vocab: int) -> tuple[int, ...]:
        """Token ids, given as one id, a list of ids, or not at all."""
        value = self._raw.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(is_whole(i, 0, vocab - 1) for i in ids):
            raise self.unfit(key, f"a token id below {vocab}, the vocabulary's size, or a list of them")
        return tuple(ids)

    def head_dim(self, hidden: str, heads: str) -> int:
        """Width of a head, from the keys of the hidden size and the number of heads. RoPE needs an even one."""
        width, rest = divmod(self.integer(hidden), self.integer(heads))
        if rest or width % 2:
            raise self.unfit(heads, f"a divisor of {hidden!r} = {self.integer(hidden)} that leaves an even head width")
        return width

    def rotary_dim(self, key: str, head_dim: int) -> int | None:
        """Channels of a head that RoPE turns, from the key of their share; None where it is absent or all of them."""
        share = self._raw.get(key)
        if share is None:
            return None
        if not is_real(share, 0) or share > 1 or int(head_dim * share) % 2 or int(head_dim * share) < 2:
            raise self.unfit(key, f"a share up to 1 of the head's {head_dim} channels that leaves an even number")
        turned = int(head_dim * share)
        return None if turned == head_dim else turned

    def kv_heads(self, key: str, heads: int) -> int:
        """Number of key and value heads, which divides `heads`. Where the key is absent it is `heads`."""
        value = self.integer(key, heads)
        if heads % value:
            raise self.unfit(key, f"a divisor of the {heads} attention heads")
        return value
