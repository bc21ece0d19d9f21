"""Prompts and responses as what a likelihood is computed of."""

from collections.abc import Sequence
from dataclasses import dataclass

from remask.errors import ConfigError
from remask.llm import LLM


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and a response after it, as token ids; the prompt may be empty."""

    prompt: Sequence[int]
    response: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def encode_pair(llm: LLM, prompt: str, response: str) -> Pair:
    """A pair of texts as token ids, encoded apart, so that no token spans both.

    White space at the end of the prompt goes to the response, whose tokens mostly begin with it. An end token that the
    tokenizer puts behind the prompt is dropped. Raises `ConfigError` without a tokenizer.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, so there are no texts to score; give a model with one")
    stripped = prompt.rstrip()
    ids = llm.tokenizer.encode(stripped) if stripped else []
    if ids and ids[-1] in llm.loaded.config.stop_ids:
        ids = ids[:-1]
    return Pair(ids, llm.tokenizer.encode(prompt[len(stripped) :] + response, add_special_tokens=False))


def encode_reply(llm: LLM, prompt: str, response: str) -> Pair:
    """The pair of a user's turn, rendered by the chat template, and the assistant's answer.

    Raises `ConfigError` without a tokenizer or a chat template.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, so there are no texts to score; give a model with one")
    asked = llm.tokenizer.apply_chat([{"role": "user", "content": prompt}])
    return Pair(asked, llm.tokenizer.encode(response, add_special_tokens=False))
