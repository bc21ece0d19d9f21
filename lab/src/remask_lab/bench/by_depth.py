"""BiCache at every depth on one workload: where its accuracy falls, beside what the depth table rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remask.llm import LLM
from remask_lab.bench.contenders import Contender, contender
from remask_lab.bench.workload import Workload

if TYPE_CHECKING:
    pass


def at_depths(
    llm: LLM, workload: Workload, depths: Iterable[int], settings: Mapping[str, Any] | None = None
) -> list[Contender]:
    """Returns `bicache` at each of `depths` as contenders named "bicache depth=B". `settings` are its other settings.

    Raises `ConfigError` on depths that the model does not have.
    """
    return [
        replace(contender(llm, "bicache", {**(settings or {}), "depth": depth}, workload), name=_name(depth))
        for depth in depths
    ]


def _name(depth: int) -> str:
    return f"bicache depth={depth}"
