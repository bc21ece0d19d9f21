"""The prompts of a profile: GSM8K by default, a bundled model's own task for such a model, or a file of prompts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remask.checkpoint.loaded import LoadedModel
from remask.checks.values import check_choice, json_object
from remask.depth.requests import read_system_prompt, readable_task
from remask.errors import ConfigError
from remask.text.tokenizer import ROLES, Tokenizer
from remask_lab import gsm8k
from remask_lab.similarity.conversations import (
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

KINDS = ("messages", "prompt", "prompt_token_ids")
_TASK_PROMPTS: Mapping[str, Callable[[Tokenizer], PromptSet]] = {
    "tariff": tariff_prompts,
    "relay": relay_prompts,
    "transit": transit_prompts,
}


def default_prompts(model: LoadedModel) -> PromptSet:
    """The prompts on which `model` is profiled by default.

    That is GSM8K for a tokenizer of English, the task of a bundled model for its small vocabulary, and random token ids
    for other tokenizers and without one.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        return RandomPrompts(model.config)
    task = readable_task(tokenizer)
    if task is None:
        return RandomPrompts(model.config, "random token ids, as the model's tokenizer does not read the default texts")
    return _TASK_PROMPTS.get(task, _gsm8k)(tokenizer)


def read_prompts(path: str | Path, model: LoadedModel) -> PromptSet:
    """Read a JSONL file of prompts, each line an object of `messages`, `prompt` (text) or `prompt_token_ids`.

    Raises `ConfigError` where the file cannot be read or is empty, mixes texts and token ids, or has a line, which the
    message numbers, that `model` cannot be asked.
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
    """`prompts` with the text of a file as the system prompt of all of them (BiCache section 5.1).

    Raises `ConfigError` where the file holds no text, or the model has no tokenizer.
    """
    text, tokenizer = read_system_prompt(path), model.tokenizer
    if tokenizer is None:
        raise ConfigError(f"the system prompt {path} needs a tokenizer, and this model folder has none; leave it out")
    if not tokenizer.has_chat_template:
        return SystemPrompt(prompts, tuple(tokenizer.encode(f"{text}\n\n")), Path(path).name)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
    tokens = tokenizer.apply_chat(messages)[: tokenizer.shared_prefix(messages)]
    return SystemPrompt(prompts, tuple(tokens), Path(path).name)


def _gsm8k(tokenizer: Tokenizer) -> ChatPrompts:
    """The questions of GSM8K's test split that come with the package."""
    conversations = gsm8k.conversations()
    return ChatPrompts(f"{len(conversations)} questions of GSM8K's test split", conversations, tokenizer)


def _line(text: str, model: LoadedModel) -> Any:
    """The prompt of one line: a tuple of messages, or of token ids. Raises `ConfigError` on an invalid line."""
    line = json_object("a line", text)
    for key in line:
        check_choice("key", key, KINDS)
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
    """Check a list of token ids. Raises `ConfigError`."""
    valid = isinstance(value, list) and value and all(type(token) is int and 0 <= token < vocab for token in value)
    if not valid:
        raise ConfigError(f"prompt_token_ids must be a list of token ids from 0 to {vocab - 1}, got {value!r}")
    return tuple(value)


def _messages(value: Any) -> tuple[Message, ...]:
    """Check a list of messages, one of a user among them. Raises `ConfigError`."""
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        for message in value
    ):
        raise ConfigError(f"messages must be a list of {{role, content}}, roles {', '.join(ROLES)}; got {value!r}")
    if not any(message["role"] == "user" for message in value):
        raise ConfigError("messages must hold a user's turn")
    return tuple(value)
