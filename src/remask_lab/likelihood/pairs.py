"""Pairs of a prompt and a response as token ids, whose likelihood is computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from remask.errors import ConfigError
from remask.llm import LLM
from remask.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the response after it, as token ids. The prompt may be empty."""

    prompt: Sequence[int]
    response: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def encode_pair(llm: LLM, prompt: str, response: str) -> Pair:
    """Encode two texts apart, so that no token spans both.

    White space at the end of the prompt goes to the response, whose tokens mostly begin with it. Raises `ConfigError`
    without a tokenizer.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, so there are no texts to score; give a model with one")
    stripped = prompt.rstrip()
    ids = encode_open(llm, llm.tokenizer, stripped) if stripped else []
    return Pair(ids, llm.tokenizer.encode(prompt[len(stripped) :] + response, add_special_tokens=False))


def encode_open(llm: LLM, tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text that goes on: an end token that the tokenizer puts behind it is dropped."""
    ids = tokenizer.encode(text)
    return ids[:-1] if ids and ids[-1] in llm.loaded.config.stop_ids else ids


def encode_reply(llm: LLM, prompt: str, response: str) -> Pair:
    """Encode a user's turn by the chat template, and the assistant's answer.

    Raises `ConfigError` without a tokenizer or a chat template.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, so there are no texts to score; give a model with one")
    asked = llm.tokenizer.apply_chat([{"role": "user", "content": prompt}])
    return Pair(asked, llm.tokenizer.encode(response, add_special_tokens=False))
