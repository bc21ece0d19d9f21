"""The default requests that a depth table is measured with: questions about texts that the model can read."""

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

MIN_WORDS: Final = 0.9  # share of a task's words that a tokenizer must encode and decode to read the task
SPELLING: Final = 3  # tokens per word from which on a tokenizer spells a text rather than knows its words
ENGLISH: Final = "town"  # the task in English; bundled models have vocabularies for other tasks
RANDOM_LENGTHS: Final = 192, 32, 32  # tokens of a random shared prefix, of the prompt behind it, and of the response


@dataclass(frozen=True, slots=True)
class _Task:
    # Draws requests; the arguments are their number, the number of system prompts, and a seed
    draw: Callable[[int, int, int], Sequence[Any]]
    max_tokens: int  # of a response


_TASKS: Final[Mapping[str, _Task]] = {
    "town": _Task(partial(town.make_workload, settings=town.TownSettings(shops=8)), town.SAMPLING["max_tokens"]),
    "tariff": _Task(tariff.make_workload, tariff.SAMPLING["max_tokens"]),
    "relay": _Task(relay.make_workload, relay.SAMPLING["max_tokens"]),
    "transit": _Task(transit.make_workload, transit.SAMPLING["max_tokens"]),
}


def readable_task(tokenizer: Tokenizer | None) -> str | None:
    """The name of the task whose texts `tokenizer` reads best; None if it reads none of them.

    This is tariff or relay if the tokenizer spells English and knows the words of the task, else `ENGLISH`, or transit
    if it cannot read English.
    """
    if tokenizer is None:
        return None
    texts = {name: task.draw(1, 1, 0)[0].messages[0]["content"] for name, task in _TASKS.items()}
    if _spells(tokenizer, texts[ENGLISH]):
        for name in ("tariff", "relay"):
            if not _spells(tokenizer, texts[name]):
                return name
    return next((name for name in (ENGLISH, "transit") if _can_read(tokenizer, texts[name])), None)


def _can_read(tokenizer: Tokenizer, text: str) -> bool:
    """Whether nearly all words of `text` survive encoding and decoding."""
    words = text.lower().split()
    decoded = "".join(tokenizer.decode(tokenizer.encode(text)).lower().split())
    return sum(word in decoded for word in words) >= MIN_WORDS * len(words)


def _spells(tokenizer: Tokenizer, text: str) -> bool:
    """Whether `text` takes so many tokens that the tokenizer knows few of its words."""
    return len(tokenizer.encode(text)) >= SPELLING * len(text.split())


def default_requests(model: LoadedModel, count: int, seed: int, system: str | None = None) -> tuple[list[Request], str]:
    """Draw `count` requests. Returns them with their description for people.

    Each has its own system prompt as shared prefix, or all have `system`. If the model can read no task, requests are
    random tokens; with a `system` prompt this raises `ConfigError` instead.
    """
    name = readable_task(model.tokenizer)
    if name is None or model.tokenizer is None:
        if system is not None:
            raise ConfigError("--system-prompt: the model has no tokenizer that reads texts; leave it out")
        return _random_requests(model, count, seed), f"random token ids; seed {seed}"
    task = _TASKS[name]
    requests = []
    for number, item in enumerate(task.draw(count, count, seed)):
        messages = item.messages if system is None else [{"role": "system", "content": system}, *item.messages[1:]]
        tokens, prefix_length = _encode_messages(messages, model.tokenizer)
        requests.append(Request(str(number), tokens, SamplingParams(max_tokens=task.max_tokens), prefix_length))
    prompt_note = "" if system is None else " under the given system prompt"
    return requests, f"questions of the task {name}{prompt_note}; seed {seed}"


def _encode_messages(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], int]:
    """The tokens of a system prompt and a question, and how many of them are the shared prefix."""
    if tokenizer.has_chat_template:
        return encode(messages, tokenizer)
    shared, question = (tokenizer.encode(message["content"]) for message in messages)
    return [*shared, *question], len(shared)


def _random_requests(model: LoadedModel, count: int, seed: int) -> list[Request]:
    """Requests of random tokens, shorter than `RANDOM_LENGTHS` if the model's canvas is."""
    config = model.config
    rng = random.Random(seed)
    # A mask in a prompt would be another position to fill.
    ids = [token for token in range(config.vocab) if token != config.mask_id]
    scale = min(1.0, config.max_length / sum(RANDOM_LENGTHS))
    prefix_length, suffix_length, response_length = (max(1, int(scale * length)) for length in RANDOM_LENGTHS)
    params = SamplingParams(max_tokens=response_length)
    prompts = [rng.choices(ids, k=prefix_length + suffix_length) for _ in range(count)]
    return [Request(str(number), prompt, params, prefix_length) for number, prompt in enumerate(prompts)]


def read_system_prompt(path: str | Path) -> str:
    """The text of a file, stripped. Raises `ConfigError` if it cannot be read or is empty."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the system prompt {path} cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"the system prompt {path} holds no text")
    return text
