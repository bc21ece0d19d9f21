"""The example that the page starts with: a conversation, and the policies that can run it."""

import logging
from collections.abc import Mapping
from typing import Any

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import names_for
from remask.policies.depth_lookup import DepthLookup
from remask.request.sampling_params import SamplingParams
from remask.sampling.defaults import overlaid
from remask.tasks.cards import card

log = logging.getLogger(__name__)

_REFRESHES = {"refresh_interval": 4}  # often enough for a response of 8 tokens to show some
_OUTER = "bicache"
_NOT_INNER = ("none", "reuse", "exact", _OUTER)  # cannot be the inner policy of a composition
_PLAIN_CANVAS = "The sky is [[4]] because [[2-12]]."
_PLAIN = (
    {"role": "system", "content": "You are a helpful assistant. Answer in one or two short sentences."},
    {"role": "user", "content": "Why is the sky blue?"},
)


def example(llm: LLM, defaults: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a question, the usual sampling parameters, and policies.

    The question is `messages`, its `answer` (the right one, null if none is known), the answer with holes (`canvas`)
    and as a question of `POST /v1/decisions` (`decision`, or null). With a bundled model, `number` selects it; all
    questions are about one system prompt. `defaults` are the server's sampling parameters.
    """
    settings = llm.cache_config or None
    asked: dict[str, Any] = {
        "messages": list(_PLAIN),
        "answer": None,
        "canvas": _PLAIN_CANVAS,
        "decision": None,
    }
    known = card(llm.loaded.name)
    if known is not None:
        question = known.draw(number)
        asked = {
            "messages": known.messages(question),
            "answer": question.answer,
            "canvas": question.canvas,
            "decision": question.decision,
        }
        settings = settings or (_REFRESHES if llm.cache == _OUTER else None)
    specs = _specs(llm, llm.params({}, defaults, prompt_tokens=1))
    usual = overlaid(llm.sampling, defaults)
    return {
        **asked,
        "sampling": usual,
        "policies": specs,
        "pair": _pair(llm, specs),
        "cache": llm.cache_name,
        "cache_config": settings,
    }


def _specs(llm: LLM, sampling: SamplingParams) -> list[str]:
    """Return the policies that can run with this sampling, alone and inside `bicache`."""
    names = names_for(llm.loaded.config.kind)
    inner = [f"{_OUTER}+{name}" for name in names if name not in _NOT_INNER] if _OUTER in names else []
    request = Request("example", [0], sampling)
    own = [llm.cache] if isinstance(llm.cache, str) else []  # a request can name no object
    return [spec for spec in dict.fromkeys([*names, *inner, *own]) if _runs(llm, spec, request)]


def _pair(llm: LLM, specs: list[str]) -> list[str]:
    """Return two policies to compare: the simplest one, and the server's own or another that needs no profiling."""
    others = [spec for spec in specs if spec != specs[0] and (_OUTER not in spec or llm.has_depth_table)]
    preferred = [spec for spec in (llm.cache_name, _OUTER) if spec in others]
    return [specs[0], [*preferred, *others, specs[0]][0]]


def _runs(llm: LLM, spec: str, request: Request) -> bool:
    try:
        llm.engine.check(request.with_policy(llm.policy(spec, None, lambda: DepthLookup({}))))
    except ConfigError:
        return False
    except Exception:  # of another package's policy: the page lists the others
        log.exception("cache policy %r cannot be checked, and the playground leaves it out", spec)
        return False
    return True
