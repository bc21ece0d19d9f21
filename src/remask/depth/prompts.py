"""The prompts of a profile: GSM8K by default, a bundled model's own task for such a model, or a file of prompts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remask.checkpoint.loaded import LoadedModel
from remask.checks.values import json_object
from remask.depth.conversations import (
    ChatPrompts,
    Message,
    PromptSet,
    RandomPrompts,
    SystemPrompt,
    TokenPrompts,
    relay_prompts,
    tariff_prompts,
    transit_prompts,
)
from remask.errors import ConfigError, UnknownNameError
from remask.tasks import gsm8k, relay, tariff, transit
from remask.text.tokenizer import ROLES, Tokenizer

KINDS = ("messages", "prompt", "prompt_token_ids")
READABLE = 0.9  # a prompt set suits a tokenizer if this share of its words survives encoding and decoding
SPELLED = 3  # tokens a word from which on a tokenizer spells a text rather than reads it


def default_prompts(model: LoadedModel) -> PromptSet:
    """Return the prompts on which `model` is profiled if none are given.

    GSM8K, or the task of a bundled model for a tokenizer that has its small vocabulary: transit where GSM8K cannot be
    read at all, tariff or relay where it is spelled in bytes and their words are not; random token ids without a
    tokenizer that reads any of them.
    """
    if model.tokenizer is not None:
        arithmetic = _gsm8k(model.tokenizer)
        if _spells(model.tokenizer, arithmetic.conversations[0][0]["content"]):
            if not _spells(model.tokenizer, tariff.make_workload(1, 1, 0)[0].prompt.text):
                return tariff_prompts(model.tokenizer)
            if not _spells(model.tokenizer, relay.make_workload(1, 1, 0)[0].prompt.text):
                return relay_prompts(model.tokenizer)
        if reads(model.tokenizer, arithmetic.conversations[0][0]["content"]):
            return arithmetic
        if reads(model.tokenizer, transit.make_workload(1, 1, 0)[0].messages[0]["content"]):
            return transit_prompts(model.tokenizer)
        return RandomPrompts(model.config, "random token ids, as the model's tokenizer does not read the default texts")
    return RandomPrompts(model.config)


def read_prompts(path: str | Path, model: LoadedModel) -> PromptSet:
    """Read the prompts of a JSONL file. Each line is an object of `messages`, `prompt` (text) or `prompt_token_ids`.

    Raises `ConfigError`, with the number of the line, if a line cannot be used with `model`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts {path} cannot be read: {error}") from error
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
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


def under_system_prompt(path: str | Path, prompts: PromptSet, model: LoadedModel) -> PromptSet:
    """`prompts` behind the text of a file, which is the system prompt of all of them (BiCache section 5.1).

    Raises `ConfigError` where the file holds no text, or the model has no tokenizer.
    """
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the system prompt {path} cannot be read: {error}") from error
    tokenizer = model.tokenizer
    if not text:
        raise ConfigError(f"the system prompt {path} holds no text")
    if tokenizer is None:
        raise ConfigError(f"the system prompt {path} needs a tokenizer, and this model folder has none; leave it out")
    if not tokenizer.has_chat_template:
        return SystemPrompt(prompts, tuple(tokenizer.encode(f"{text}\n\n")), Path(path).name)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
    tokens = tokenizer.apply_chat(messages)[: tokenizer.shared_prefix(messages)]
    return SystemPrompt(prompts, tuple(tokens), Path(path).name)


def _gsm8k(tokenizer: Tokenizer) -> ChatPrompts:
    conversations = gsm8k.conversations()
    return ChatPrompts(f"{len(conversations)} questions of GSM8K's test split", conversations, tokenizer)


def reads(tokenizer: Tokenizer, text: str) -> bool:
    """Whether nearly all words of `text` survive encoding and decoding."""
    words = text.lower().split()
    left = "".join(tokenizer.decode(tokenizer.encode(text)).lower().split())
    return sum(word in left for word in words) >= READABLE * len(words)


def _spells(tokenizer: Tokenizer, text: str) -> bool:
    """Whether `text` takes so many tokens that the tokenizer knows few of its words."""
    return len(tokenizer.encode(text)) >= SPELLED * len(text.split())


def _line(text: str, model: LoadedModel) -> Any:
    """Return the prompt of one line: a tuple of messages, or a tuple of token ids."""
    line = json_object("a line", text)
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
