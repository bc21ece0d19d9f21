"""The common parts of tasks: messages, settings, requests, and the drawing of workloads."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from remask.checks.fields import check, parse
from remask.errors import ConfigError

_MAX_DRAWS = 32  # of a new question, for each earlier one

Message = dict[str, str]  # of a chat: `role` and `content`


class _Text(Protocol):
    @property
    def text(self) -> str: ...


P = TypeVar("P")
Q = TypeVar("Q")
SystemPrompt = TypeVar("SystemPrompt", bound=_Text)
Question = TypeVar("Question", bound=_Text)


class TaskSettings:
    """Base of the settings of a task. Raises `ConfigError` when made with a value that is not allowed."""

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
        """The chat messages to send; all requests about this system prompt share those before the last one."""
        return messages(self.prompt, self.question)


def messages(prompt: _Text, question: _Text) -> list[Message]:
    """The chat messages of one request: the shared system prompt, then the question."""
    return [{"role": "system", "content": prompt.text}, {"role": "user", "content": question.text}]


def deal(
    rng: random.Random,
    request_count: int,
    prompt_count: int,
    draw_prompt: Callable[[random.Random], P],
    draw_question: Callable[[random.Random, P, Any], Q],
    kinds: Sequence[Any] = (),
) -> list[tuple[int, P, Q]]:
    """Draw `request_count` questions over `prompt_count` system prompts, as shuffled (index, prompt, question).

    System prompts and `kinds` of questions are dealt out evenly: their counts differ by at most one, so that a small
    workload is no easier or harder than a large one by chance. No question about a system prompt repeats before all of
    its kind have occurred, as one that a model misses would count twice; another one replaces it. Other draws do not
    depend on replacements. Raises `ConfigError` if there are no requests, or fewer than prompts.
    """
    check_counts(request_count, prompt_count)
    system_prompts = [draw_prompt(rng) for _ in range(prompt_count)]
    request_kinds = [kinds[number % len(kinds)] if kinds else None for number in range(request_count)]
    if kinds:  # else each prompt would get some of the kinds only, as both cycle through the requests
        rng.shuffle(request_kinds)
    workload = []
    earlier: dict[tuple[int, Any], list[Q]] = {}
    for number, kind in enumerate(request_kinds):
        index = number % prompt_count
        prompt = system_prompts[index]
        question = draw_question(rng, prompt, kind)
        earlier_questions = earlier.setdefault((index, kind), [])
        if question in earlier_questions:
            other_rng = random.Random()
            other_rng.setstate(rng.getstate())
            # With so many draws a question that has not occurred is found in all likelihood.
            draws = (draw_question(other_rng, prompt, kind) for _ in range(_MAX_DRAWS * (len(earlier_questions) + 1)))
            replacement = next((draw for draw in draws if draw not in earlier_questions), None)
            if replacement is None:
                earlier_questions.clear()
            else:
                question = replacement
        earlier_questions.append(question)
        workload.append((index, prompt, question))
    rng.shuffle(workload)
    return workload


def draw_groups(keys: Sequence[str], items: Sequence[str], group_count: int) -> dict[tuple[str, str], int]:
    """The fixed random group, from 0, of each item under each key. The groups of a key have equally many items."""
    rng = random.Random(1)
    size = len(items) // group_count
    return {(key, item): index // size for key in keys for index, item in enumerate(rng.sample(items, len(items)))}


def check_counts(request_count: int, prompt_count: int) -> None:
    """Raise `ConfigError` if a workload would have no request, or fewer than it has system prompts."""
    if request_count < 1:
        raise ConfigError(f"requests is {request_count}; a workload has at least 1.")
    if not 1 <= prompt_count <= request_count:
        raise ConfigError(f"prompts is {prompt_count}; it lies between 1 and the number of requests, {request_count}.")
