"""Plain values as JSON, with their types kept.

Numbers, text, bytes and the standard containers cross from one process to the other as copies. A value of any other
type stays where it is, and a reference to it crosses. Decoding builds standard types only, so whatever the other side
sends, none of its code runs here.
"""

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any, Final

LINE_BYTES: Final = 2**24
"""The longest line that either side reads."""

ITEMS: Final = 10**6
"""The most items that are taken out of an iterator."""

_CONTAINERS: Final[tuple[tuple[type[Collection[Any]], str], ...]] = (
    (tuple, "tuple"),
    (set, "set"),
    (frozenset, "frozenset"),
    (deque, "deque"),
)
_BUILD: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": lambda pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "iterator": iter,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "fraction": lambda parts: Fraction(*parts),
}


def encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """`value` as what `json.dumps` takes. `refer` gives the number of a value that cannot be copied.

    Instances of a subclass of a plain type cross as the plain type. Iterators cross as their items.

    Raises:
        ValueError: an iterator has more than `ITEMS` items.
        TypeError: raised by `refer`, where nothing may be referred to.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number.bit_length() < 64 else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, list):
        return [encode(item, refer) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [encode(each, refer) for pair in dict.items(value) for each in pair]}
    for kind, tag in _CONTAINERS:
        if isinstance(value, kind):
            return {tag: [encode(item, refer) for item in value]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Fraction):
        return {"fraction": [encode(value.numerator, refer), encode(value.denominator, refer)]}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, Iterator):
        items = list(islice(value, ITEMS + 1))
        if len(items) > ITEMS:
            raise ValueError(f"an iterator has more than {ITEMS} items")
        return {"iterator": [encode(item, refer) for item in items]}
    if not isinstance(value, type):
        if hasattr(value, "__index__"):
            return encode(operator.index(value), refer)
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of NumPy
            return encode(value.item(), refer)
    return {"reference": refer(value)}


def decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """The value that `encode` was given. `resolve` gives the value, or a stand-in, for a reference's number.

    Raises `ValueError` or `TypeError` on what `encode` never returns.
    """
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"a value must have one tag, got {len(data)}")
    ((tag, held),) = data.items()
    if tag in _BUILD:
        return _BUILD[tag]([decode(item, resolve) for item in held])
    if tag == "int":
        return int(held, 16)
    if tag == "bytes":
        return bytes.fromhex(held)
    if tag == "bytearray":
        return bytearray.fromhex(held)
    if tag == "decimal":
        return Decimal(held)
    if tag == "reference":
        return resolve(operator.index(held))
    raise ValueError(f"unknown tag {tag[:20]!r}")


def one_line(text: str, limit: int = 2000) -> str:
    """`text` without line breaks or repeated spaces, cut at `limit` characters."""
    return " ".join(text[: 2 * limit].split())[:limit]
