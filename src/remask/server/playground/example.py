"""What the page starts with: a conversation that the model can answer, and the policies that it may run under."""

import random
from typing import Any

from remask.evals.workload import BUNDLED_SAMPLING
from remask.llm import LLM
from remask.models.source import BUNDLED
from remask.policies import names_for
from remask.tasks.transit import draw_prompt, draw_question, messages, reference_response

_LINE = 20  # seed of the line that all examples ask about, so that they share a prefix
_OUTER = "bicache"
_WHOLE = ("none", "reuse", "exact", _OUTER)  # not to be put inside another policy
_PLAIN = (
    {"role": "system", "content": "You are a helpful assistant. Answer in one or two short sentences."},
    {"role": "user", "content": "Why is the sky blue?"},
)


def example(llm: LLM, number: int) -> dict[str, Any]:
    """Messages, the answer where there is only one, the sampling that suits the model, and its policies.

    On the bundled model `number` picks the question; all of them are about one line.
    """
    told: dict[str, Any] = {"messages": list(_PLAIN), "answer": None, "sampling": {}}
    if llm.loaded.name == BUNDLED:
        line = draw_prompt(random.Random(_LINE))
        question = draw_question(random.Random(number), line)
        told = {
            "messages": messages(line, question),
            "answer": reference_response(line, question),
            "sampling": dict(BUNDLED_SAMPLING),
        }
    return {**told, "policies": _specs(llm), "cache": llm.cache, "layers": llm.loaded.config.layers}


def _specs(llm: LLM) -> list[str]:
    """Policies that are defined on the model's kind, and those that can stand inside `bicache`."""
    names = names_for(llm.loaded.config.kind)
    inner = [f"{_OUTER}+{name}" for name in names if name not in _WHOLE] if _OUTER in names else []
    return list(dict.fromkeys([*names, *inner, llm.cache]))
