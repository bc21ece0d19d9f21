"""The transit task: questions that only the shared system prompt can answer.

A system prompt describes one loop line as a table of rows ``x > y ;`` in random order: stop ``x`` is followed by stop
``y``. A rider asks ``from x go 3 , where am i ?`` and the reference response walks the line before it answers::

    system     you guide riders on one loop line . each stop has one next stop . table : elm > oak ; ash > elm ; ...
    user       from ash go 2 , where am i ?
    assistant  ash > elm > oak ## oak

The loop is drawn afresh for every system prompt, so a model that cannot read the table can only guess: with ``n`` rows
the chance of a right guess is at most about ``1 / (n - 1)``. Many riders ask about one line, which makes the task a
natural workload for caching a prefix across requests.

Every text is made of words separated by single spaces, so that a word-level tokenizer reproduces it exactly. All draws
come from a `random.Random`, so a seed fixes a workload.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from remask.checks.fields import declare
from remask.checks.values import Whole
from remask.errors import ConfigError
from remask.tasks.workload import TaskRequest, TaskSettings, deal

# fmt: off
STOPS: Final[tuple[str, ...]] = (
    "abbey", "acorn", "alder", "amber", "anchor", "apple", "arch", "ash", "aspen", "attic", "badger", "bakery",
    "bamboo", "barley", "basin", "beacon", "beech", "birch", "bluff", "bridge", "brook", "cabin", "canal",
    "canyon", "castle", "cedar", "chapel", "cherry", "cliff", "clover", "cobalt", "coral", "cotton", "crane",
    "creek", "crown", "dairy", "delta", "depot", "dune", "eagle", "elm", "falcon", "fern", "ferry", "field",
    "forge", "fox", "garden", "glen", "grove", "harbor", "hazel", "heron", "hill", "holly", "island", "ivy",
    "jade", "juniper", "lagoon", "larch", "lark", "laurel", "lemon", "lily", "lotus", "maple", "market",
    "meadow", "mill", "mint", "moss", "oak", "olive", "orchard", "otter", "palm", "park", "pearl", "pier",
    "pine", "plaza", "pond", "poplar", "quarry", "raven", "reef", "ridge", "river", "rose", "saddle",
)
# fmt: on

RULES: Final = "you guide riders on one loop line . each stop has one next stop . table :"
SEPARATOR: Final = "##"  # before the final answer in a response
DEFAULT_ROWS: Final = 56  # of a table; the system prompt then has some 250 tokens
MAX_HOPS: Final = 3  # that a question asks for
SAMPLING: Final = {"max_tokens": 16, "steps": 8, "block_length": 2}  # a stop and its separator a block


@dataclass(frozen=True, slots=True)
class TransitSettings(TaskSettings):
    """How hard a workload is."""

    rows: int = declare(DEFAULT_ROWS, Whole(MAX_HOPS + 1, len(STOPS)), "Stops of a line: rows of its table.")

    task: ClassVar[str] = "transit"


@dataclass(frozen=True, slots=True)
class TransitPrompt:
    """A system prompt: the table of one loop line, pairs of a stop and the next stop in the order of the text."""

    rows: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The content of the system message."""
        return f"{RULES} {format_rows(self.rows)}"


@dataclass(frozen=True, slots=True)
class TransitQuestion:
    """A rider at the stop `start` who asks which stop is `hops` hops away."""

    start: str
    hops: int

    @property
    def text(self) -> str:
        """The content of the user message."""
        return f"from {self.start} go {self.hops} , where am i ?"


@dataclass(frozen=True, slots=True)
class TransitRequest(TaskRequest[TransitPrompt, TransitQuestion]):
    """A question about one line."""

    @property
    def answer(self) -> str:
        """The stop that must follow the last ``##`` of the response."""
        return self.reference.rpartition(SEPARATOR)[2].strip()


def format_rows(rows: Sequence[tuple[str, str]]) -> str:
    """The rows as text, ``x > y ;`` each."""
    return " ".join(f"{stop} > {next_stop} ;" for stop, next_stop in rows)


def draw_prompt(rng: random.Random, rows: int = DEFAULT_ROWS) -> TransitPrompt:
    """Draw a line of `rows` stops, a random loop over a random choice of names, and shuffle its table.

    A loop of more than `MAX_HOPS` stops never returns to the start within one question, so every answer differs from
    the start. Raises `ConfigError` if the number of rows is not allowed.
    """
    if not MAX_HOPS < rows <= len(STOPS):
        raise ConfigError(f"rows is {rows}; a line has {MAX_HOPS + 1} to {len(STOPS)} stops.")
    loop = rng.sample(STOPS, rows)
    table = list(zip(loop, loop[1:] + loop[:1], strict=True))
    rng.shuffle(table)
    return TransitPrompt(tuple(table))


def draw_question(rng: random.Random, prompt: TransitPrompt, hops: int | None = None) -> TransitQuestion:
    """Draw a start on the line, and a number of hops from 1 to `MAX_HOPS` if `hops` is None. Raises `ConfigError`."""
    if hops is not None and not 1 <= hops <= MAX_HOPS:
        raise ConfigError(f"hops is {hops}; a question asks for 1 to {MAX_HOPS} hops.")
    start, _ = rng.choice(prompt.rows)
    return TransitQuestion(start, rng.randint(1, MAX_HOPS) if hops is None else hops)


def route(prompt: TransitPrompt, question: TransitQuestion) -> list[str]:
    """The stops of the ride, from the start to the answer. Raises `ConfigError` if the line has no such start."""
    next_stop = dict(prompt.rows)
    if question.start not in next_stop:
        raise ConfigError(f"start is {question.start!r}, which is no stop of this line.")
    stops = [question.start]
    for _ in range(question.hops):
        stops.append(next_stop[stops[-1]])
    return stops


def reference_response(prompt: TransitPrompt, question: TransitQuestion) -> str:
    """The right response in full: the ride, then the answer after ``##``."""
    stops = route(prompt, question)
    return f"{' > '.join(stops)} {SEPARATOR} {stops[-1]}"


def final_answer(text: str) -> str | None:
    """The text after the last ``##`` without white space at both ends; None if there is no ``##``."""
    _, separator, tail = text.rpartition(SEPARATOR)
    return tail.strip() if separator else None


def is_correct(text: str, answer: str) -> bool:
    """Whether the final answer of `text` is `answer`: other case, further words or punctuation make it wrong."""
    return final_answer(text) == answer


def is_ride(prompt: TransitPrompt, question: TransitQuestion, text: str) -> bool:
    """Whether `text` names the right stops in order, up to its first ``##`` if it has one."""
    return text.partition(SEPARATOR)[0].strip() == " > ".join(route(prompt, question))


def keeps_format(text: str) -> bool:
    """Whether `text` has one ``##``, with something before it and a single word after it."""
    ride, _, tail = text.partition(SEPARATOR)
    return bool(ride.strip()) and SEPARATOR not in tail and len(tail.split()) == 1


def make_workload(requests: int, prompts: int, seed: int, rows: int = DEFAULT_ROWS) -> list[TransitRequest]:
    """Draw `requests` questions over `prompts` different lines, as `deal` does; a seed fixes them."""
    hops = range(1, MAX_HOPS + 1)
    workload = deal(random.Random(seed), requests, prompts, partial(draw_prompt, rows=rows), draw_question, hops)
    return [TransitRequest(i, line, question, reference_response(line, question)) for i, line, question in workload]
