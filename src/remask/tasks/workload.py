"""What the tasks share: messages, settings, requests, and how a workload is dealt out."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from remask.checks.fields import check, parse
from remask.errors import ConfigError

_DRAWS = 32  # for each question that has been asked

Message = dict[str, str]  # of a chat: `role` and `content`


class _Text(Protocol):
    @property
    def text(self) -> str: ...


P = TypeVar("P")
Q = TypeVar("Q")
SystemPrompt = TypeVar("SystemPrompt", bound=_Text)
Question = TypeVar("Question", bound=_Text)


class TaskSettings:
    """How hard a workload is. A bad setting raises `ConfigError`, which names it, its value and what is allowed."""

    __slots__ = ()
    task: ClassVar[str]

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def from_mapping(cls, values: object) -> Self:
        """Settings from JSON-like values. Raises `ConfigError` on unknown names and on values that are not allowed."""
        return parse(cls, values, "task settings", f"setting of the task {cls.task}")


@dataclass(frozen=True, slots=True)
class TaskRequest(Generic[SystemPrompt, Question]):
    """A question about the system prompt number `prompt_index`, whose only right response is `reference`."""

    prompt_index: int
    prompt: SystemPrompt
    question: Question
    reference: str

    @property
    def messages(self) -> list[Message]:
        """The chat messages to send; all before the last one is shared by all requests about this system prompt."""
        return messages(self.prompt, self.question)


def messages(prompt: _Text, question: _Text) -> list[Message]:
    """The chat messages of one request: the shared system prompt, then the question."""
    return [{"role": "system", "content": prompt.text}, {"role": "user", "content": question.text}]


def deal(
    rng: random.Random,
    requests: int,
    prompts: int,
    draw_prompt: Callable[[random.Random], P],
    draw_question: Callable[[random.Random, P, Any], Q],
    kinds: Sequence[Any] = (),
) -> list[tuple[int, P, Q]]:
    """Draw `requests` questions over `prompts` different system prompts, shuffled, with their prompts' numbers.

    No question is asked twice about one system prompt before all of its kind have been: one that a model misses would
    count twice. Others are drawn in the place of repeated ones, and the rest stays as it is drawn.
    System prompts and `kinds` of questions are dealt out evenly (every count differs from the others by at most one),
    so that a small workload is no easier or harder than a large one by chance of the draw. Raises `ConfigError` where
    there are no requests, or fewer than prompts.
    """
    check_sizes(requests, prompts)
    drawn = [draw_prompt(rng) for _ in range(prompts)]
    order = [kinds[number % len(kinds)] if kinds else None for number in range(requests)]
    if kinds:  # shuffled apart from the prompts: both cycle through the requests and would otherwise be tied together
        rng.shuffle(order)
    workload = []
    earlier: dict[tuple[int, Any], list[Q]] = {}
    for number, kind in enumerate(order):
        index = number % prompts
        question, others = draw_question(rng, drawn[index], kind), earlier.setdefault((index, kind), [])
        if question in others:
            apart = random.Random()
            apart.setstate(rng.getstate())
            # If one is left, a draw of this many finds it in all likelihood: at worst one of the next number of them.
            more = (draw_question(apart, drawn[index], kind) for _ in range(_DRAWS * (len(others) + 1)))
            another = next((new for new in more if new not in others), None)
            if another is None:
                others.clear()
            else:
                question = another
        others.append(question)
        workload.append((index, drawn[index], question))
    rng.shuffle(workload)
    return workload


def check_sizes(requests: int, prompts: int) -> None:
    """Raise `ConfigError` where a workload would have no request, or fewer than it has system prompts."""
    if requests < 1:
        raise ConfigError(f"requests is {requests}; a workload has at least 1.")
    if not 1 <= prompts <= requests:
        raise ConfigError(f"prompts is {prompts}; it lies between 1 and the number of requests, {requests}.")
