"""Shapes of published models, and of small ones for tests. Their sizes are a table, `shapes.txt`.

A checkpoint's own config.json decides for a real model. No file of sdar-1.7b was read: it is as its base, Qwen3-1.7B.

In it a line of one word begins a family. The columns of the other lines are fields of `ModelConfig` in JSON without
spaces, where "-" stands for the default, and the last one is the shape's name.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from remask.model.config import ModelConfig


def shapes_of(
    family: str, others: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), **switches: Any
) -> dict[str, ModelConfig]:
    """The shapes of a family, by name.

    `switches` are fields of `ModelConfig` that all of them share, and `others` those of single shapes, by their names.
    """
    return {
        name: ModelConfig(family=family, **{**switches, **sizes, **others.get(name, {})})
        for name, sizes in _table()[family].items()
    }


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The fields of every shape in `shapes.txt`, by family and name."""
    header, *lines = Path(__file__).with_name("shapes.txt").read_text(encoding="utf-8").splitlines()
    table: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        *cells, name = line.split()
        if not cells:
            family = table.setdefault(name, {})
            continue
        values = {field: json.loads(cell) for field, cell in zip(header.split(), cells, strict=False) if cell != "-"}
        family[name] = values | {"stop_ids": tuple(values["stop_ids"])}
    return table
