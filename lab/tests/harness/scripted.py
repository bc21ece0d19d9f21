"""Generation with given texts. All else is the engine's."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from remask.engine.request import Request
from remask_lab.harness.run import Generation, generate


def scripted(texts: Sequence[str]) -> Callable[..., Generation]:
    """`generate`, and then the `texts` in place of what was generated."""

    def run(llm: Any, requests: Sequence[Request], *rest: Any) -> Generation:
        found = generate(llm, requests, *rest)
        outputs = [replace(output, text=text) for output, text in zip(found.outputs, texts, strict=True)]
        return replace(found, outputs=outputs)

    return run
