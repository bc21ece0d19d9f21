"""Conversations of any length: from chat prompts, token ids, a bundled model's task, or random tokens."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Protocol, TypeAlias, TypeVar

from remask.errors import ConfigError
from remask.model.config import ModelConfig
from remask.tasks import relay, tariff, transit
from remask.text.tokenizer import Tokenizer

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A token sequence whose next turn is the assistant's.

    Attributes:
        ends: the lengths at which a user's turn begins.
        system: how many leading tokens are the system prompt of all conversations; None where each has its own.
    """

    tokens: Sequence[int]
    ends: tuple[int, ...] = ()
    system: int | None = None


class PromptSet(Protocol):
    """Where the token sequences of a profile come from."""

    @property
    def source(self) -> str:
        """A description of the prompts, for the table."""

    @property
    def canvas(self) -> int:
        """Default length of the longest canvas, in tokens."""

    @property
    def response(self) -> int:
        """Default number of masks at the end of a canvas."""

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return a conversation of at least `length` tokens. The same state of `rng` gives the same conversation."""


@dataclass(frozen=True, slots=True)
class ChatPrompts:
    """Long conversations made of single ones: the turns of several, then the question of one more.

    The system message of the last one comes first. A prompt without an answer is joined with the next prompt to one
    message, because some chat templates require alternating roles.
    """

    source: str
    conversations: tuple[tuple[Message, ...], ...]
    tokenizer: Tokenizer
    canvas: int = 1024
    response: int = 128

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return shuffled conversations, as many as give `length` tokens."""
        order = rng.sample(self.conversations, len(self.conversations))

        def compose(turns: int) -> list[Message]:
            own = _until_question(order[0])
            others = [message for i in range(turns) for message in order[(i + 1) % len(order)]]
            system = [message for message in own if message["role"] == "system"]
            rest = [message for message in [*others, *own] if message["role"] != "system"]
            return [*system, *_merged(rest)]

        return _grown_chat(self.tokenizer, compose, length)


Questions: TypeAlias = Iterator[tuple[str, str]]
"""Questions with their right answers."""

_Q = TypeVar("_Q", tariff.TariffQuestion, relay.RelayQuestion)


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """A bundled model's task: a system prompt, then questions with their right answers.

    `begin` draws a system prompt, and returns with it what asks a number of questions about it.
    """

    task: str
    source: str
    canvas: int
    response: int
    tokenizer: Tokenizer
    begin: Callable[[random.Random], tuple[str, Callable[[int], Questions]]]

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return a new system prompt, and as many questions as give `length` tokens."""
        system, ask = self.begin(rng)

        def compose(turns: int) -> list[Message]:
            messages: list[Message] = [{"role": "system", "content": system}]
            for question, answer in ask(turns):
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            return messages[:-1]

        return _grown_chat(self.tokenizer, compose, length)


def tariff_prompts(tokenizer: Tokenizer, kind: str = "plan") -> TaskPrompts:
    """The task tariff, `kind` being the kind of every question.

    A canvas of the usual length is the system prompt, one question, whole up to ratio 0.85, and one response.
    """
    settings = tariff.TariffSettings(orders=64)

    def begin(rng: random.Random) -> tuple[str, Callable[[int], Questions]]:
        prompt = tariff.draw_prompt(rng, settings)
        draw = partial(tariff.draw_question, prompt=prompt, kind=kind)
        return prompt.text, _asking(rng, draw, partial(tariff.reference_response, prompt))

    more = "" if kind == "plan" else f", {kind}"
    source = f"the tariff task (remask.tasks.tariff), questions answered about the same orders{more}"
    return TaskPrompts("tariff", source, 200, 8, tokenizer, begin)


def relay_prompts(tokenizer: Tokenizer) -> TaskPrompts:
    """The task relay.

    A canvas of the usual length is the system prompt and one question, which is whole up to ratio 0.8: beyond it the
    season would stand nowhere behind the prefix.
    """

    def begin(rng: random.Random) -> tuple[str, Callable[[int], Questions]]:
        prompt = relay.draw_prompt(rng, relay.RelaySettings())
        draw = partial(relay.draw_question, prompt=prompt)
        return prompt.text, _asking(rng, draw, partial(relay.reference_response, prompt))

    source = "the relay task (remask.tasks.relay), questions answered about the same goods"
    return TaskPrompts("relay", source, 96, relay.HOPS, tokenizer, begin)


def transit_prompts(tokenizer: Tokenizer, hops: int | None = None) -> TaskPrompts:
    """The task transit, `hops` being those of every question; None: any number.

    A canvas of the usual length is the system prompt, one question and one response. Tables have 16 to 64 rows, so that
    system prompts end at many ratios.
    """

    def begin(rng: random.Random) -> tuple[str, Callable[[int], Questions]]:
        seed, rows = rng.getrandbits(32), rng.randint(16, 64)
        line = transit.make_workload(1, 1, seed, rows)[0].prompt

        def ask(turns: int) -> Questions:
            for number, request in enumerate(transit.make_workload(turns, 1, seed, rows)):
                question = request.question
                if hops is not None:
                    question = transit.draw_question(random.Random(seed + number), line, hops)
                yield question.text, transit.reference_response(line, question)

        return line.text, ask

    more = "" if hops is None else f", {hops} hops"
    source = f"the transit task (remask.tasks.transit), questions answered about one table{more}"
    return TaskPrompts("transit", source, 288, 16, tokenizer, begin)


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """One system prompt before the conversations of `prompts` (BiCache section 5.1); `tokens` are those that it takes.

    The prefix of every canvas is the system prompt, or its head where the canvas is too short for all of it.
    """

    prompts: PromptSet
    tokens: tuple[int, ...]
    name: str

    @property
    def source(self) -> str:
        """The system prompt, and what stands behind it."""
        return f"the system prompt {self.name} of {len(self.tokens)} tokens, then {self.prompts.source}"

    @property
    def canvas(self) -> int:
        """That of the prompts."""
        return self.prompts.canvas

    @property
    def response(self) -> int:
        """That of the prompts."""
        return self.prompts.response

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return the system prompt and a conversation behind it."""
        behind = self.prompts.draw(rng, length)
        return Conversation((*self.tokens, *behind.tokens), system=len(self.tokens))


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts that are given as token ids, joined one after the other."""

    source: str
    prompts: tuple[tuple[int, ...], ...]
    canvas: int = 1024
    response: int = 128

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return shuffled prompts, as many as give `length` tokens."""
        order = rng.sample(self.prompts, len(self.prompts))
        tokens = _grown(lambda count: [token for i in range(count) for token in order[i % len(order)]], length)
        return Conversation(tokens, tuple(accumulate(len(prompt) for prompt in order)))


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Token ids drawn evenly from the vocabulary, for models that have no tokenizer."""

    config: ModelConfig
    source: str = "random token ids, as the model has no tokenizer"
    canvas: int = 1024
    response: int = 128

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return `length` tokens without the mask token."""
        mask = self.config.mask_id
        drawn = (rng.randrange(self.config.vocab - 1) for _ in range(length))
        return Conversation([token + (token >= mask) for token in drawn])


def _asking(
    rng: random.Random, draw: Callable[[random.Random], _Q], answer: Callable[[_Q], str]
) -> Callable[[int], Questions]:
    """What asks a number of questions that `draw` draws; the first ones are always the same."""
    seed = rng.getrandbits(32)

    def ask(turns: int) -> Questions:
        questions = random.Random(seed)
        for _ in range(turns):
            question = draw(questions)
            yield question.text, answer(question)

    return ask


def _until_question(conversation: Sequence[Message]) -> list[Message]:
    """Return the conversation up to its last user turn, without the answer."""
    last = max(place for place, message in enumerate(conversation) if message["role"] == "user")
    return list(conversation[: last + 1])


def _merged(messages: Sequence[Message]) -> list[Message]:
    groups = groupby(messages, key=lambda message: message["role"])
    return [{"role": role, "content": "\n\n".join(m["content"] for m in group)} for role, group in groups]


def _grown_chat(tokenizer: Tokenizer, compose: Callable[[int], list[Message]], length: int) -> Conversation:
    """Return the first of `compose(1)`, `compose(2)`, `compose(4)`, ... that has `length` tokens.

    Without a chat template the texts are joined by blank lines, and no ends of turns are known.
    """
    if not tokenizer.has_chat_template:
        return Conversation(
            _grown(lambda turns: tokenizer.encode("\n\n".join(m["content"] for m in compose(turns))), length)
        )
    messages: list[Message] = []

    def render(turns: int) -> list[int]:
        messages[:] = compose(turns)
        return tokenizer.apply_chat(messages)

    tokens = _grown(render, length)
    ends = []
    for place in [place for place, message in enumerate(messages) if message["role"] == "user" and place]:
        end = tokenizer.shared_prefix(messages[: place + 1])
        if end > length:
            break
        ends.append(end)
    return Conversation(tokens, tuple(ends))


def _grown(render: Callable[[int], list[int]], length: int) -> list[int]:
    """Return the first of `render(1)`, `render(2)`, `render(4)`, ... that has `length` tokens."""
    count, tokens = 1, render(1)
    while len(tokens) < length:
        count *= 2
        longer = render(count)
        if len(longer) <= len(tokens):
            raise ConfigError("the prompts yield no tokens")
        tokens = longer
    return tokens
