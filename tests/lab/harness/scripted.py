"""Generation whose texts are given; all else is as the engine did it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from remask_lab.harness.generation import Ask, Generation, generate


def scripted(texts: Sequence[str]) -> Callable[..., Generation]:
    """`generate`, and then the `texts` in place of what was generated."""

    def run(llm: Any, asks: Sequence[Ask], *rest: Any) -> Generation:
        found = generate(llm, asks, *rest)
        outputs = [replace(output, text=text) for output, text in zip(found.outputs, texts, strict=True)]
        return replace(found, outputs=outputs)

    return run
