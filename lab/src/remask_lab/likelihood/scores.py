"""Scores of responses by likelihood, and multiple choice as in lm-eval."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from remask.checks import ModelKind
from remask.errors import ConfigError, UnknownNameError
from remask_lab.likelihood.masked import MaskLikelihoods
from remask_lab.likelihood.passes import Pair
from remask_lab.records.interval import wilson
from remask_lab.records.jsonl import Line

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Encode = Callable[[str, str], Pair]
"""Encodes a prompt and a response as a pair. Raises `ConfigError` on one that cannot be scored."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its `choices`, each encoded in `pairs`. `answer` is the index of the right choice."""

    prompt: str
    choices: Sequence[str]
    answer: int
    pairs: Sequence[Pair]


@dataclass(frozen=True, slots=True)
class Response:
    """The text of a response, and its pair with the prompt."""

    text: str
    pair: Pair


def read_items(lines: Sequence[Line], encode: Encode) -> list[Question] | list[Response]:
    """Read the lines of a file: questions where the first line has `choices`, else prompts with a `response`.

    `choices` is a list of texts, or an object of `text` and `label` as in ARC. `answer` is the label or letter of a
    choice, its index from 0 (MMLU), or its text. Raises `ConfigError`, which names the line and the field, on an
    invalid line or a mix of both kinds, and where `encode` raises it.
    """
    several = lines[0].has("choices")
    for line in lines:
        if line.has("choices") != several:
            raise line.error("a file holds questions with 'choices', or prompts with a 'response', and not both")
    if several:
        return [_question(line, encode) for line in lines]
    return [Response(text, _pair(line, text, encode)) for line in lines for text in (line.text("response"),)]


def _question(line: Line, encode: Encode) -> Question:
    choices: Any = line.get("choices")
    labels: Any = list(LETTERS)
    if isinstance(choices, dict):
        labels = choices.get("label", labels)
        choices = choices.get("text")
    texts = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not texts or len(choices) < 2 or not isinstance(labels, list):
        raise line.error(
            f"field 'choices' must be a list of two texts or more, or an object of text and label, got {choices!r}"
        )
    pairs = [_pair(line, choice, encode) for choice in choices]
    answer = line.get("answer")
    for named in (labels[: len(choices)], range(len(choices)), choices):
        if not isinstance(answer, bool) and answer in named:
            return Question(line.text("prompt"), choices, named.index(answer), pairs)
    raise line.error(
        f"field 'answer' is {answer!r}, which is neither a number from 0 to {len(choices) - 1}, nor one of the labels "
        f"{', '.join(map(str, labels[: len(choices)]))}, nor the text of a choice"
    )


def _pair(line: Line, text: str, encode: Encode) -> Pair:
    prompt = line.text("prompt")
    try:
        return encode(prompt, text)
    except ConfigError as error:
        raise line.error(str(error)) from error


def score_responses(estimator: MaskLikelihoods, items: Sequence[Response], progress: bool = False) -> dict[str, Any]:
    """Returns the log-likelihood of every response, and that of all together in nats a token, with its error."""
    found = estimator.score([item.pair for item in items], range(len(items)), progress)
    tokens = sum(each.tokens for each in found)
    error = sum(each.standard_error**2 for each in found) ** 0.5
    return {
        "responses": [{"text": item.text, **asdict(each)} for item, each in zip(items, found, strict=True)],
        "tokens": tokens,
        "log_likelihood_per_token": sum(each.log_likelihood for each in found) / tokens,
        "standard_error": error / tokens,
    }


def score_questions(estimator: MaskLikelihoods, items: Sequence[Question], progress: bool = False) -> dict[str, Any]:
    """Returns the most likely choice of every question, and the share of right ones with Wilson's 95 % interval.

    `accuracy` compares log-likelihoods, `accuracy_norm` log-likelihoods a character of the choice.
    """
    pairs = [pair for item in items for pair in item.pairs]
    groups = [number for number, item in enumerate(items) for _ in item.choices]
    found = iter(estimator.score(pairs, groups, progress))
    questions = []
    for item in items:
        own = [next(found) for _ in item.choices]
        sums = [each.log_likelihood for each in own]
        by_character = [value / len(choice) for value, choice in zip(sums, item.choices, strict=True)]
        questions.append(
            {
                "prompt": item.prompt,
                "answer": item.answer,
                "chosen": sums.index(max(sums)),
                "chosen_norm": by_character.index(max(by_character)),
                "choices": [{"text": text, **asdict(each)} for text, each in zip(item.choices, own, strict=True)],
            }
        )
    result: dict[str, Any] = {"questions": questions}
    for name, chosen in (("accuracy", "chosen"), ("accuracy_norm", "chosen_norm")):
        right = sum(question[chosen] == question["answer"] for question in questions)
        result[name] = right / len(questions)
        result[f"{name}_interval"] = list(wilson(right, len(questions)))
    return result


def check_kind(name: str, kind: ModelKind) -> None:
    """Raise `ConfigError` where models of this `kind` have no likelihood; `name` is the model's."""
    if kind == "uniform":
        raise UnknownNameError("subject", "likelihood of uniform models", ())
    if kind != "masked":
        raise ConfigError(
            f"likelihoods are bounds of masked models, and {name!r} is a {kind} model, whose bound has another formula"
        )
