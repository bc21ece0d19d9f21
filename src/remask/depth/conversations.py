"""Conversations of any length: from chat prompts, token ids, a bundled model's task, or random tokens."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Protocol

from remask.errors import ConfigError
from remask.model.config import ModelConfig
from remask.tasks import relay, tariff, transit
from remask.text.tokenizer import Tokenizer

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A token sequence whose next turn is the assistant's.

    Attributes:
        tokens: all of it.
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
        ...

    @property
    def canvas(self) -> int:
        """Default length of the longest canvas, in tokens."""
        ...

    @property
    def response(self) -> int:
        """Default number of masks at the end of a canvas."""
        ...

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return a conversation of at least `length` tokens. The same state of `rng` gives the same conversation."""
        ...


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


@dataclass(frozen=True, slots=True)
class TariffPrompts:
    """The task tariff: a system prompt with orders that nearly fills a canvas, then questions with their right answers.

    `kind` is the kind of every question. A canvas of the usual length has one, which is whole up to ratio 0.85.
    """

    tokenizer: Tokenizer
    source: str = "the tariff task (remask.tasks.tariff), questions answered about the same orders"
    canvas: int = 200  # the system prompt, one question and one response
    response: int = 8
    orders: int = 64  # of a system prompt
    kind: str = "plan"

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return new orders, and as many questions as give `length` tokens."""
        settings = tariff.TariffSettings(orders=self.orders)
        prompt, seed = tariff.draw_prompt(rng, settings), rng.getrandbits(32)

        def compose(turns: int) -> list[Message]:
            questions = random.Random(seed)
            messages: list[Message] = [{"role": "system", "content": prompt.text}]
            for _ in range(turns):
                question = tariff.draw_question(questions, prompt, self.kind, settings.asked)
                messages.append({"role": "user", "content": question.text})
                messages.append({"role": "assistant", "content": tariff.reference_response(prompt, question)})
            return messages[:-1]

        return _grown_chat(self.tokenizer, compose, length)


@dataclass(frozen=True, slots=True)
class RelayPrompts:
    """The task relay: a system prompt with goods that nearly fills a canvas, then questions with their right answers.

    A canvas of the usual length has one question, which is whole up to ratio 0.8: beyond it the season
    would stand nowhere behind the prefix.
    """

    tokenizer: Tokenizer
    source: str = "the relay task (remask.tasks.relay), questions answered about the same goods"
    canvas: int = 96  # the system prompt and one question
    response: int = relay.HOPS

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return new goods, and as many questions as give `length` tokens."""
        prompt, seed = relay.draw_prompt(rng, relay.RelaySettings()), rng.getrandbits(32)

        def compose(turns: int) -> list[Message]:
            questions = random.Random(seed)
            messages: list[Message] = [{"role": "system", "content": prompt.text}]
            for _ in range(turns):
                question = relay.draw_question(questions, prompt)
                messages.append({"role": "user", "content": question.text})
                messages.append({"role": "assistant", "content": relay.reference_response(prompt, question)})
            return messages[:-1]

        return _grown_chat(self.tokenizer, compose, length)


@dataclass(frozen=True, slots=True)
class TransitPrompts:
    """The task transit: a system prompt with a table, then riders' questions with their right answers."""

    tokenizer: Tokenizer
    source: str = "the transit task (remask.tasks.transit), questions answered about one table"
    canvas: int = 288  # the system prompt, one question and one response
    response: int = 16
    rows: tuple[int, int] = (16, 64)  # of a table, so that system prompts end at many ratios
    hops: int | None = None  # of every question; None: any number

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Return a new table with a number of rows within `rows`, and as many questions as give `length` tokens."""
        seed, rows = rng.getrandbits(32), rng.randint(*self.rows)

        def compose(turns: int) -> list[Message]:
            requests = transit.make_workload(turns, 1, seed, rows)
            line = requests[0].prompt
            messages: list[Message] = [requests[0].messages[0]]
            for number, request in enumerate(requests):
                question = request.question
                if self.hops is not None:
                    question = transit.draw_question(random.Random(seed + number), line, self.hops)
                messages.append({"role": "user", "content": question.text})
                messages.append({"role": "assistant", "content": transit.reference_response(line, question)})
            return messages[:-1]

        return _grown_chat(self.tokenizer, compose, length)


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
