"""Many names that differ in numbers, as few names with ranges of numbers."""

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def in_ranges(names: Iterable[str]) -> list[str]:
    """`names` with ranges for the numbers of experts, and for those of layers in which the same experts are named.

    A name such as `layers.3.experts.5.up` has two numbers between dots, a layer's and an expert's; others are returned
    as they are. `layers.{0-3}.experts.{0-7,9}.up` stands for 36 names.
    """
    listed, experts = list[str](), dict[tuple[tuple[str, ...], int], list[int]]()
    for name in names:
        numbers = _NUMBER.findall(name)
        if len(numbers) == 2:
            experts.setdefault((tuple(_NUMBER.split(name)), int(numbers[0])), []).append(int(numbers[1]))
        else:
            listed.append(name)
    layers: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for (parts, layer), found in experts.items():
        layers.setdefault((parts, _ranges(found)), []).append(layer)
    for (parts, inner), found in layers.items():
        listed.append(f"{parts[0]}{_ranges(found)}{parts[1]}{inner}{parts[2]}")
    return listed


def _ranges(numbers: Sequence[int]) -> str:
    """The number itself, or braces around runs of several: `{0-7,9}`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"
