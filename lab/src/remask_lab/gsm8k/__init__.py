"""GSM8K: grade-school arithmetic, answered after `##` under a system prompt of rules and worked examples.

`questions.jsonl` holds the first 200 questions and answers of GSM8K's test split (OpenAI, MIT licence beside it),
without the calculator annotations: models are trained on the other split.
"""

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import ClassVar, Final

from remask.checks.fields import declare
from remask.checks.values import Whole
from remask.tasks.transit import SEPARATOR
from remask.tasks.workload import Message, TaskSettings

RULES: Final = (
    "You solve arithmetic word problems. Think step by step, in short sentences. End with a line that holds "
    f"{SEPARATOR} and the answer as a plain number, without units."
)
EXAMPLES: Final = 8  # worked examples in every system prompt, at most
MAX_PROMPTS: Final = 12  # of a workload; their examples take about half of the questions
SAMPLING: Final = {"max_tokens": 256, "steps": 128}  # of an answer, as in the BiCache paper
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Gsm8kSettings(TaskSettings):
    """How long a system prompt is."""

    shots: int = declare(EXAMPLES, Whole(0, EXAMPLES), "Worked examples of a system prompt.")

    task: ClassVar[str] = "gsm8k"


@dataclass(frozen=True, slots=True)
class MathQuestion:
    """One question under a system prompt that other questions share."""

    messages: tuple[Message, ...]
    answer: str
    reference: str  # the worked answer, in the form that the system prompt asks for


@cache
def conversations() -> tuple[tuple[Message, Message], ...]:
    """The shipped questions and worked answers: pairs of a user's and an assistant's message."""
    lines = (files(__name__) / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(tuple(json.loads(line)["messages"]) for line in lines)


def make_questions(requests: int, prompts: int, seed: int, shots: int = EXAMPLES) -> list[MathQuestion]:
    """Draw `requests` questions over `prompts` system prompts with `shots` worked examples each, dealt out evenly.

    No question is a worked example of `EXAMPLES` shots, so they are the same under any number of `shots`. They repeat
    after all have been used.
    """
    rng = random.Random(seed)
    order = rng.sample(conversations(), len(conversations()))
    examples, asked = order[: prompts * EXAMPLES], order[prompts * EXAMPLES :]
    systems = [_system(examples[index * EXAMPLES :][:shots]) for index in range(prompts)]
    questions = []
    for index in range(requests):
        user, solution = asked[index % len(asked)]
        steps, answer = _split(solution)
        questions.append(MathQuestion((systems[index % prompts], user), answer, f"{steps} {answer}"))
    return questions


def is_solved(answer: str, text: str) -> bool:
    """Whether the last number in `text` is `answer`. Thousands separators are ignored."""
    numbers: list[str] = _NUMBER.findall(text)
    return bool(numbers) and numbers[-1].replace(",", "") == answer.replace(",", "")


def keeps_format(text: str) -> bool:
    """Whether `text` follows the rules: steps, then one separator, then a plain number."""
    steps, _, tail = text.partition(SEPARATOR)
    return bool(steps.strip()) and bool(_NUMBER.fullmatch(tail.strip()))


def _system(examples: list[tuple[Message, Message]]) -> Message:
    """The system message of rules and worked examples."""
    texts = [f"Question: {user['content']}\n{' '.join(_split(solution))}" for user, solution in examples]
    return {"role": "system", "content": "\n\n".join([RULES, *texts])}


def final_number(solution: str) -> str:
    """The number after the last `####` of a worked answer, without its thousands separators: "1,080" is "1080"."""
    return solution.rpartition("####")[2].strip().replace(",", "")


def _split(solution: Message) -> tuple[str, str]:
    """Split a worked answer into its steps, which end with the separator, and its final number."""
    steps = solution["content"].rpartition("####")[0]
    return f"{steps.strip()}\n{SEPARATOR}", final_number(solution["content"])
