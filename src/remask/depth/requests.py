"""The requests that a depth table is measured on where none are given: questions about texts that the model reads."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from remask.checkpoint.loaded import LoadedModel
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams
from remask.tasks import relay, tariff, town, transit
from remask.text.prompts import Message, encode
from remask.text.tokenizer import Tokenizer

READABLE: Final = 0.9  # a task suits a tokenizer if this share of its words survives encoding and decoding
SPELLED: Final = 3  # tokens a word from which on a tokenizer spells a text rather than reads it
ENGLISH: Final = "town"  # for tokenizers that read English; bundled models have vocabularies of their own
RANDOM: Final = 192, 32, 32  # tokens of a shared prefix, of the prompt behind it and of the response, at random


@dataclass(frozen=True, slots=True)
class _Task:
    """Draws requests by their number, that of system prompts, and a seed; `tokens` are those of a response."""

    draw: Callable[[int, int, int], Sequence[Any]]
    tokens: int


_TASKS: Final[Mapping[str, _Task]] = {
    "town": _Task(partial(town.make_workload, settings=town.TownSettings(shops=8)), town.SAMPLING["max_tokens"]),
    "tariff": _Task(tariff.make_workload, tariff.SAMPLING["max_tokens"]),
    "relay": _Task(relay.make_workload, relay.SAMPLING["max_tokens"]),
    "transit": _Task(transit.make_workload, transit.SAMPLING["max_tokens"]),
}


def readable_task(tokenizer: Tokenizer | None) -> str | None:
    """The name of the task whose texts `tokenizer` reads best; None where it reads none.

    That is `ENGLISH`, but transit where English cannot be read at all, and tariff or relay where it is spelled in bytes
    and their words are not.
    """
    if tokenizer is None:
        return None
    text = {name: task.draw(1, 1, 0)[0].messages[0]["content"] for name, task in _TASKS.items()}
    if _spells(tokenizer, text[ENGLISH]):
        read = next((name for name in ("tariff", "relay") if not _spells(tokenizer, text[name])), None)
        if read is not None:
            return read
    return next((name for name in (ENGLISH, "transit") if _reads(tokenizer, text[name])), None)


def _reads(tokenizer: Tokenizer, text: str) -> bool:
    """Whether nearly all words of `text` survive encoding and decoding."""
    words = text.lower().split()
    decoded = "".join(tokenizer.decode(tokenizer.encode(text)).lower().split())
    return sum(word in decoded for word in words) >= READABLE * len(words)


def _spells(tokenizer: Tokenizer, text: str) -> bool:
    """Whether `text` takes so many tokens that the tokenizer knows few of its words."""
    return len(tokenizer.encode(text)) >= SPELLED * len(text.split())


def default_requests(model: LoadedModel, count: int, seed: int, system: str | None = None) -> tuple[list[Request], str]:
    """So many requests, and what they are.

    Each has a system prompt of its own, which is its shared prefix; with `system` all have that one. Where the model
    reads none of the texts they are random tokens. Raises `ConfigError` on a system prompt that the model cannot read.
    """
    name = readable_task(model.tokenizer)
    if name is None or model.tokenizer is None:
        if system is not None:
            raise ConfigError("--system-prompt: the model has no tokenizer that reads texts; leave it out")
        return _random(model, count, seed), f"random token ids; seed {seed}"
    task, requests = _TASKS[name], []
    for number, item in enumerate(task.draw(count, count, seed)):
        messages = item.messages if system is None else [{"role": "system", "content": system}, *item.messages[1:]]
        tokens, shared = _tokens(messages, model.tokenizer)
        requests.append(Request(str(number), tokens, SamplingParams(max_tokens=task.tokens), shared))
    under = "" if system is None else " under the given system prompt"
    return requests, f"questions of the task {name}{under}; seed {seed}"


def _tokens(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Tokens of a system prompt and a question, and how many are the former's."""
    if tokenizer.has_chat_template:
        return encode(messages, tokenizer)
    shared, question = (tokenizer.encode(message["content"]) for message in messages)
    return [*shared, *question], len(shared)


def _random(model: LoadedModel, count: int, seed: int) -> list[Request]:
    shape, rng = model.config, random.Random(seed)
    # A mask in a prompt would be another place to fill.
    ids = [token for token in range(shape.vocab) if token != shape.mask_id]
    scale = min(1.0, shape.max_length / sum(RANDOM))
    prefix, behind, response = (max(1, int(scale * length)) for length in RANDOM)
    params = SamplingParams(max_tokens=response)
    return [Request(str(number), rng.choices(ids, k=prefix + behind), params, prefix) for number in range(count)]


def read_system_prompt(path: str | Path) -> str:
    """The text of a file. Raises `ConfigError` where it cannot be read or holds none."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the system prompt {path} cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"the system prompt {path} holds no text")
    return text
