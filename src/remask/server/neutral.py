"""Fields of OpenAI's protocol, and fields that routers add, that are not supported.

A value that changes nothing is accepted, any other is refused with the field's name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from remask.core.checks import shown
from remask.errors import ConfigError, UnknownNameError

# The values of each field that change nothing. Null always changes nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True, False),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "safety_identifier": (),
    "separate_reasoning": (True, False),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "stream_reasoning": (True, False),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


def refuse_unsupported(body: Any, known: Iterable[str]) -> Any:
    """Return `body` without its neutral fields. Anything but an object is returned as it is.

    Raises `ConfigError` on a field that asks for what is not supported, and `UnknownNameError` on unknown names.
    """
    if not isinstance(body, Mapping):
        return body
    names = frozenset(known)
    kept = {}
    for name, value in body.items():
        if name in names:
            kept[name] = value
        elif name not in NEUTRAL:
            raise UnknownNameError("field", str(name), names)
        elif value is not None and value not in NEUTRAL[name]:
            allowed = " or ".join(repr(good) for good in (None, *NEUTRAL[name]))
            raise ConfigError(f"{name} is not supported: leave it out, or send {allowed}; got {shown(value)}")
    return kept
