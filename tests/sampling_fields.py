"""Sampling parameters side by side, as goldens and drawn requests name them."""

from collections.abc import Mapping
from typing import Any

from remask.checks.fields import paths
from remask.request.sampling_params import SamplingParams, merge_sampling

_PATHS = {path.rpartition(".")[2]: path for path in paths(SamplingParams)}


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters, each in its group."""
    return merge_sampling({_PATHS.get(name, name): value for name, value in flat.items()})


def flat_params(flat: Mapping[str, Any] = {}, **more: Any) -> SamplingParams:
    """Parameters that are given side by side."""
    return SamplingParams.from_mapping(grouped({**flat, **more}))


def ungrouped(line: Mapping[str, Any]) -> dict[str, Any]:
    """A request's line whose parameters stand side by side, as oracles read them."""
    flat: dict[str, Any] = {}
    for name, value in line["sampling"].items():
        if name in ("remasking", "blocks", "uniform") and isinstance(value, Mapping):
            flat |= {name if each == "rule" else each: own for each, own in value.items()}
        else:
            flat[name] = value
    return {**line, "sampling": flat}
