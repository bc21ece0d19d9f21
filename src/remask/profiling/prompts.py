"""Conversations to profile on: GSM8K by default, the bundled model's own task for it, or a file of prompts.

`data/gsm8k.jsonl` holds the first 200 questions and answers of GSM8K's train split (OpenAI, MIT licence beside it),
without the calculator annotations, in the format that `read_prompts` takes.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from remask.errors import ConfigError, UnknownNameError
from remask.evals import transit
from remask.models.config import ModelConfig
from remask.models.loaded import LoadedModel
from remask.models.tokenizer import ROLES, Tokenizer

KINDS = ("messages", "prompt", "prompt_token_ids")
READABLE = 0.9  # share of words that must survive encoding for a set to suit a tokenizer

Message = Mapping[str, str]


class PromptSet(Protocol):
    """Where the token sequences of a profile come from."""

    @property
    def source(self) -> str:
        """What they are, for the table."""
        ...

    @property
    def canvas(self) -> int:
        """Usual length of a canvas in tokens."""
        ...

    @property
    def response(self) -> int:
        """Usual number of masks at its end."""
        ...

    def draw(self, rng: random.Random, length: int) -> list[int]:
        """At least `length` tokens of a conversation that waits for the assistant; one `rng` state, one result."""
        ...


@dataclass(frozen=True, slots=True)
class ChatPrompts:
    """Conversations put together from single ones: the turns of some, then the question of one more.

    The last conversation's system message stands first. A prompt without an answer is followed by the next prompt, in
    one message with it, because chat templates may insist on alternating roles.
    """

    source: str
    conversations: tuple[tuple[Message, ...], ...]
    tokenizer: Tokenizer
    canvas: int = 1024
    response: int = 128

    def draw(self, rng: random.Random, length: int) -> list[int]:
        """Shuffled conversations, as many as `length` tokens take."""
        order = rng.sample(self.conversations, len(self.conversations))

        def render(turns: int) -> list[int]:
            own = _until_question(order[0])
            others = [message for i in range(turns) for message in order[(i + 1) % len(order)]]
            system = [message for message in own if message["role"] == "system"]
            rest = [message for message in [*others, *own] if message["role"] != "system"]
            return _render(self.tokenizer, [*system, *_merged(rest)])

        return _grown(render, length)


@dataclass(frozen=True, slots=True)
class TransitPrompts:
    """The bundled model's task: a system prompt with a table, then riders' questions with their right answers."""

    tokenizer: Tokenizer
    source: str = "the transit task (remask.evals.transit), questions answered about one table"
    canvas: int = 288  # the system prompt, one question and one response
    response: int = 16

    def draw(self, rng: random.Random, length: int) -> list[int]:
        """A fresh table and as many questions as `length` tokens take."""
        seed = rng.getrandbits(32)

        def render(turns: int) -> list[int]:
            requests = transit.make_workload(turns, 1, seed)
            messages: list[Message] = [requests[0].messages[0]]
            for request in requests:
                messages += [request.messages[1], {"role": "assistant", "content": request.reference}]
            return _render(self.tokenizer, messages[:-1])

        return _grown(render, length)


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts given as token ids, one after the other."""

    source: str
    prompts: tuple[tuple[int, ...], ...]
    canvas: int = 1024
    response: int = 128

    def draw(self, rng: random.Random, length: int) -> list[int]:
        """Shuffled prompts, as many as `length` tokens take."""
        order = rng.sample(self.prompts, len(self.prompts))
        return _grown(lambda count: [token for i in range(count) for token in order[i % len(order)]], length)


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Token ids drawn evenly from the vocabulary, for models that have no tokenizer."""

    config: ModelConfig
    source: str = "random token ids, as the model has no tokenizer"
    canvas: int = 1024
    response: int = 128

    def draw(self, rng: random.Random, length: int) -> list[int]:
        """`length` tokens, none of them the mask."""
        mask = self.config.mask_id
        return [token + (token >= mask) for token in (rng.randrange(self.config.vocab - 1) for _ in range(length))]


def default_prompts(model: LoadedModel) -> PromptSet:
    """The prompts to profile `model` on if none are given.

    GSM8K, or the transit task for a tokenizer that cannot read GSM8K and can read the task's small vocabulary (the
    bundled model's); random token ids without a tokenizer that reads either.
    """
    if model.tokenizer is not None:
        gsm8k = _gsm8k(model.tokenizer)
        if _reads(model.tokenizer, gsm8k.conversations[0][0]["content"]):
            return gsm8k
        if _reads(model.tokenizer, transit.make_workload(1, 1, 0)[0].messages[0]["content"]):
            return TransitPrompts(model.tokenizer)
        return RandomPrompts(model.config, "random token ids, as the model's tokenizer does not read the default texts")
    return RandomPrompts(model.config)


def read_prompts(path: str | Path, model: LoadedModel) -> PromptSet:
    """Prompts of a JSONL file, each line an object of `messages`, `prompt` (text) or `prompt_token_ids`.

    Raises `ConfigError`, with the number of the line, where one cannot be used with `model`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts {path} cannot be read: {error}") from error
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                lines.append(_line(line, model))
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise ConfigError(f"{path} holds no prompts")
    chats = tuple(line for line in lines if isinstance(line[0], Mapping))
    source = f"{len(lines)} prompts of {Path(path).name}"
    if not chats:
        return TokenPrompts(source, tuple(lines))
    if len(chats) < len(lines):
        raise ConfigError(f"{path} holds both texts and token ids; give one kind")
    assert model.tokenizer is not None
    return ChatPrompts(source, chats, model.tokenizer)


def _gsm8k(tokenizer: Tokenizer) -> ChatPrompts:
    lines = (files("remask.profiling") / "data" / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    conversations = tuple(tuple(json.loads(line)["messages"]) for line in lines)
    return ChatPrompts(f"{len(conversations)} questions of GSM8K's train split", conversations, tokenizer)


def _reads(tokenizer: Tokenizer, text: str) -> bool:
    """Whether nearly all words of `text` are left after encoding and decoding."""
    words = text.lower().split()
    left = "".join(tokenizer.decode(tokenizer.encode(text)).lower().split())
    return sum(word in left for word in words) >= READABLE * len(words)


def _line(text: str, model: LoadedModel) -> Any:
    """The prompt on one line: a tuple of messages, or a tuple of token ids."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(line, dict):
        raise ConfigError(f"a line must be a JSON object, got {type(line).__name__}")
    for key in line:
        if key not in KINDS:
            raise UnknownNameError("key", str(key), KINDS)
    if len(line) != 1:
        raise ConfigError(f"a line needs exactly one of {', '.join(KINDS)}, got {', '.join(line) or 'none'}")
    ((kind, value),) = line.items()
    if kind == "prompt_token_ids":
        return _tokens(value, model.config.vocab)
    if model.tokenizer is None:
        raise ConfigError(f"{kind!r} needs a tokenizer, and this model folder has none; use prompt_token_ids")
    if kind == "prompt":
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"prompt must be a text that is not empty, got {value!r}")
        return ({"role": "user", "content": value},)
    return _messages(value)


def _tokens(value: Any, vocab: int) -> tuple[int, ...]:
    fine = isinstance(value, list) and value and all(type(token) is int and 0 <= token < vocab for token in value)
    if not fine:
        raise ConfigError(f"prompt_token_ids must be a list of token ids from 0 to {vocab - 1}, got {value!r}")
    return tuple(value)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not all(
        isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in value
    ):
        raise ConfigError(f"messages must be a list of {{role, content}}, roles {', '.join(ROLES)}; got {value!r}")
    if not any(message["role"] == "user" for message in value):
        raise ConfigError("messages must hold a user's turn")
    return tuple(value)


def _until_question(conversation: Sequence[Message]) -> list[Message]:
    """The conversation as it stands when the last user turn waits for its answer."""
    last = max(place for place, message in enumerate(conversation) if message["role"] == "user")
    return list(conversation[: last + 1])


def _merged(messages: Sequence[Message]) -> list[Message]:
    groups = groupby(messages, key=lambda message: message["role"])
    return [{"role": role, "content": "\n\n".join(m["content"] for m in group)} for role, group in groups]


def _render(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat(messages)
    return tokenizer.encode("\n\n".join(message["content"] for message in messages))


def _grown(render: Callable[[int], list[int]], length: int) -> list[int]:
    """The first of `render(1)`, `render(2)`, `render(4)`, ... that has `length` tokens."""
    count, tokens = 1, render(1)
    while len(tokens) < length:
        count *= 2
        longer = render(count)
        if len(longer) <= len(tokens):
            raise ConfigError("the prompts yield no tokens")
        tokens = longer
    return tokens
