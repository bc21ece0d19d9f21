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
TRANSIT_ROWS = 16, 64  # the fewest and the most


@dataclass(frozen=True, slots=True)
class Conversation:
    """A token sequence whose next turn is the assistant's.

    Attributes:
        ends: positions at which a user's turn begins, ascending.
        system: length of the system prompt that all conversations share; None where each has its own.
    """

    tokens: Sequence[int]
    ends: tuple[int, ...] = ()
    system: int | None = None


class PromptSet(Protocol):
    """A source of conversations for a profile."""

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
    """Long conversations that are joined from several: the turns of some, then the question of one more.

    The system message of the last one comes first. Messages of one role in a row become one message, because some chat
    templates require alternating roles.
    """

    source: str
    conversations: tuple[tuple[Message, ...], ...]
    tokenizer: Tokenizer
    canvas: int = 1024
    response: int = 128

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Join shuffled conversations until they have `length` tokens."""
        shuffled = rng.sample(self.conversations, len(self.conversations))

        def compose(turns: int) -> list[Message]:
            last = _until_question(shuffled[0])
            earlier_turns = [message for turn in range(turns) for message in shuffled[(turn + 1) % len(shuffled)]]
            system = [message for message in last if message["role"] == "system"]
            messages = [message for message in [*earlier_turns, *last] if message["role"] != "system"]
            return [*system, *_merge_roles(messages)]

        return _grow_chat(self.tokenizer, compose, length)


Questions: TypeAlias = Iterator[tuple[str, str]]
"""Questions with their right answers."""

_Q = TypeVar("_Q", tariff.TariffQuestion, relay.RelayQuestion)


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """A bundled model's task: a system prompt, then questions with their right answers.

    `begin` draws a system prompt, and returns it with a function that yields a number of questions about it.
    """

    task: str
    source: str
    canvas: int
    response: int
    tokenizer: Tokenizer
    begin: Callable[[random.Random], tuple[str, Callable[[int], Questions]]]

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Draw a system prompt, and add questions until there are `length` tokens."""
        system, ask = self.begin(rng)

        def compose(turns: int) -> list[Message]:
            messages: list[Message] = [{"role": "system", "content": system}]
            for question, answer in ask(turns):
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            return messages[:-1]

        return _grow_chat(self.tokenizer, compose, length)


def tariff_prompts(tokenizer: Tokenizer, kind: str = "plan") -> TaskPrompts:
    """Prompts of the task tariff with questions of one `kind`.

    A canvas of the default length holds the system prompt, one question, whole up to ratio 0.85, and one response.
    """
    settings = tariff.TariffSettings(orders=64)

    def begin(rng: random.Random) -> tuple[str, Callable[[int], Questions]]:
        prompt = tariff.draw_prompt(rng, settings)
        draw = partial(tariff.draw_question, prompt=prompt, kind=kind)
        return prompt.text, _question_source(rng, draw, partial(tariff.reference_response, prompt))

    suffix = "" if kind == "plan" else f", {kind}"
    source = f"the tariff task (remask.tasks.tariff), questions answered about the same orders{suffix}"
    return TaskPrompts("tariff", source, canvas=200, response=8, tokenizer=tokenizer, begin=begin)


def relay_prompts(tokenizer: Tokenizer) -> TaskPrompts:
    """Prompts of the task relay.

    A canvas of the default length holds the system prompt and one question, which is whole up to ratio 0.8. At larger
    ratios the season of the question would be cut off.
    """

    def begin(rng: random.Random) -> tuple[str, Callable[[int], Questions]]:
        prompt = relay.draw_prompt(rng, relay.RelaySettings())
        draw = partial(relay.draw_question, prompt=prompt)
        return prompt.text, _question_source(rng, draw, partial(relay.reference_response, prompt))

    source = "the relay task (remask.tasks.relay), questions answered about the same goods"
    return TaskPrompts("relay", source, canvas=96, response=relay.HOPS, tokenizer=tokenizer, begin=begin)


def transit_prompts(tokenizer: Tokenizer, hops: int | None = None) -> TaskPrompts:
    """Prompts of the task transit with questions of `hops` hops; None draws the number.

    A canvas of the default length holds the system prompt, one question and one response. Tables have `TRANSIT_ROWS`
    rows, so that system prompts end at many ratios.
    """

    def begin(rng: random.Random) -> tuple[str, Callable[[int], Questions]]:
        seed, rows = rng.getrandbits(32), rng.randint(*TRANSIT_ROWS)
        prompt = transit.make_workload(1, 1, seed, rows)[0].prompt

        def ask(turns: int) -> Questions:
            for number, request in enumerate(transit.make_workload(turns, 1, seed, rows)):
                question = request.question
                if hops is not None:
                    question = transit.draw_question(random.Random(seed + number), prompt, hops)
                yield question.text, transit.reference_response(prompt, question)

        return prompt.text, ask

    suffix = "" if hops is None else f", {hops} hops"
    source = f"the transit task (remask.tasks.transit), questions answered about one table{suffix}"
    return TaskPrompts("transit", source, canvas=288, response=16, tokenizer=tokenizer, begin=begin)


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """One system prompt, of token ids `tokens`, before all conversations of `prompts` (BiCache section 5.1).

    The prefix of every canvas is the system prompt, or its head where the canvas is too short for all of it.
    """

    prompts: PromptSet
    tokens: tuple[int, ...]
    name: str

    @property
    def source(self) -> str:
        """The system prompt and the prompts behind it, in words."""
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
        """Draw a conversation of `length` tokens, and put the system prompt before it."""
        conversation = self.prompts.draw(rng, length)
        return Conversation((*self.tokens, *conversation.tokens), system=len(self.tokens))


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts of token ids, which are joined to longer ones."""

    source: str
    prompts: tuple[tuple[int, ...], ...]
    canvas: int = 1024
    response: int = 128

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Join shuffled prompts until they have `length` tokens."""
        shuffled = rng.sample(self.prompts, len(self.prompts))
        tokens = _grow(
            lambda count: [token for index in range(count) for token in shuffled[index % len(shuffled)]], length
        )
        return Conversation(tokens, tuple(accumulate(len(prompt) for prompt in shuffled)))


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Token ids drawn evenly from the vocabulary, for models that have no tokenizer."""

    config: ModelConfig
    source: str = "random token ids, as the model has no tokenizer"
    canvas: int = 1024
    response: int = 128

    def draw(self, rng: random.Random, length: int) -> Conversation:
        """Draw `length` token ids other than the mask token."""
        mask = self.config.mask_id
        ids = (rng.randrange(self.config.vocab - 1) for _ in range(length))
        return Conversation([token + (token >= mask) for token in ids])


def _question_source(
    rng: random.Random, draw: Callable[[random.Random], _Q], answer: Callable[[_Q], str]
) -> Callable[[int], Questions]:
    """A function that yields a number of questions of `draw`; more of them begin with the same ones."""
    seed = rng.getrandbits(32)

    def ask(turns: int) -> Questions:
        questions = random.Random(seed)
        for _ in range(turns):
            question = draw(questions)
            yield question.text, answer(question)

    return ask


def _until_question(conversation: Sequence[Message]) -> list[Message]:
    """The conversation up to its last user turn."""
    last = max(index for index, message in enumerate(conversation) if message["role"] == "user")
    return list(conversation[: last + 1])


def _merge_roles(messages: Sequence[Message]) -> list[Message]:
    """Messages of one role in a row as one message, with blank lines between their texts."""
    groups = groupby(messages, key=lambda message: message["role"])
    return [{"role": role, "content": "\n\n".join(message["content"] for message in group)} for role, group in groups]


def _grow_chat(tokenizer: Tokenizer, compose: Callable[[int], list[Message]], length: int) -> Conversation:
    """Render the first of `compose(1)`, `compose(2)`, `compose(4)`, ... that has `length` tokens.

    Without a chat template the texts are joined by blank lines, and the conversation has no `ends`.
    """
    if not tokenizer.has_chat_template:
        return Conversation(
            _grow(lambda turns: tokenizer.encode("\n\n".join(message["content"] for message in compose(turns))), length)
        )
    messages: list[Message] = []

    def render(turns: int) -> list[int]:
        messages[:] = compose(turns)
        return tokenizer.apply_chat(messages)

    tokens = _grow(render, length)
    ends = []
    user_turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
    for index in filter(None, user_turns):  # nothing stands before message 0
        end = tokenizer.shared_prefix(messages[: index + 1])
        if end > length:
            break
        ends.append(end)
    return Conversation(tokens, tuple(ends))


def _grow(render: Callable[[int], list[int]], length: int) -> list[int]:
    """The first of `render(1)`, `render(2)`, `render(4)`, ... that has `length` tokens.

    Raises `ConfigError` where more turns give no more tokens.
    """
    count, tokens = 1, render(1)
    while len(tokens) < length:
        count *= 2
        longer = render(count)
        if len(longer) <= len(tokens):
            raise ConfigError("the prompts yield no tokens")
        tokens = longer
    return tokens
