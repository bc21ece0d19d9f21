"""The model of `remask chat` in this process."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from remask.answers.answer import Answer
from remask.checkpoint.bundled import BUNDLED
from remask.cli.options import engine_config, object_option, open_llm, sampling_option
from remask.engine.config import AUTO
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM
from remask.tasks.cards import card


def local_answers(
    args: argparse.Namespace,
) -> tuple[Callable[[list[dict[str, str]]], Iterator[str]], Mapping[str, Any] | None]:
    """Load the model. Returns what answers the turns of a conversation, text by text as it settles, and the model's
    card, which bundled ones have.

    Raises what `LLM` raises, and `ConfigError` where the model reads no conversations.
    """
    args.model = args.model or BUNDLED
    sampling = sampling_option(args)
    llm = open_llm(args, args.cache or AUTO, object_option("--cache-config", args.cache_config), engine_config(args))
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ConfigError(f"the model {args.model!r} has no chat template; a conversation needs one")
    found = card(llm.loaded.name)
    return lambda turns: _settled(llm, turns, sampling), None if found is None else found.as_json()


def _settled(llm: LLM, turns: list[dict[str, str]], sampling: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settled text of the answer, computed by the engine of `llm`."""
    assert llm.tokenizer is not None
    (request,) = llm.requests([turns], sampling)
    answer = Answer(0, request, llm.tokenizer, llm.loaded.config.stop_ids)
    llm.engine.add(request)
    while llm.engine.busy:
        delta = answer.take(llm.engine.step())
        if delta.result is not None and delta.result.error is not None:
            raise RemaskError(delta.result.error)
        yield delta.text
