"""Log-likelihoods of responses, and multiple choice by likelihood as in lm-eval."""

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
    """A prompt and its choices; `pairs` has each choice with the prompt, and `answer` is the index of the right one."""

    prompt: str
    choices: Sequence[str]
    answer: int
    pairs: Sequence[Pair]


@dataclass(frozen=True, slots=True)
class Response:
    """A response: its text, and its pair with the prompt."""

    text: str
    pair: Pair


def read_items(lines: Sequence[Line], encode: Encode) -> list[Question] | list[Response]:
    """Read the lines of a file: questions with `choices`, or prompts with a `response`, by the first line.

    `choices` is a list of texts, or an object of `text` and `label` as in ARC. `answer` is the label or letter of a
    choice, its index from 0 (MMLU), or its text. Raises `ConfigError`, which names the line and the field, on an
    invalid line or a mix of both kinds, and where `encode` raises it.
    """
    multiple_choice = lines[0].has("choices")
    for line in lines:
        if line.has("choices") != multiple_choice:
            raise line.error("a file holds questions with 'choices', or prompts with a 'response', and not both")
    if multiple_choice:
        return [_question(line, encode) for line in lines]
    return [Response(text, _pair(line, text, encode)) for line in lines for text in (line.text("response"),)]


def _question(line: Line, encode: Encode) -> Question:
    """The question of a line, as `read_items` says. Raises `ConfigError`, which names the line and the field."""
    choices: Any = line.get("choices")
    labels: Any = list(LETTERS)
    if isinstance(choices, dict):
        labels = choices.get("label", labels)
        choices = choices.get("text")
    valid = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not valid or len(choices) < 2 or not isinstance(labels, list):
        raise line.error(
            f"field 'choices' must be a list of two texts or more, or an object of text and label, got {choices!r}"
        )
    pairs = [_pair(line, choice, encode) for choice in choices]
    answer = line.get("answer")
    for choice_names in (labels[: len(choices)], range(len(choices)), choices):
        if not isinstance(answer, bool) and answer in choice_names:
            return Question(line.text("prompt"), choices, choice_names.index(answer), pairs)
    raise line.error(
        f"field 'answer' is {answer!r}, which is neither a number from 0 to {len(choices) - 1}, nor one of the labels "
        f"{', '.join(map(str, labels[: len(choices)]))}, nor the text of a choice"
    )


def _pair(line: Line, text: str, encode: Encode) -> Pair:
    """Encode the line's prompt and `text`. Raises `ConfigError`, which names the line."""
    prompt = line.text("prompt")
    try:
        return encode(prompt, text)
    except ConfigError as error:
        raise line.error(str(error)) from error


def score_responses(estimator: MaskLikelihoods, items: Sequence[Response], progress: bool = False) -> dict[str, Any]:
    """The log-likelihood of every response in nats, and the mean over all tokens with its standard error."""
    scores = estimator.score([item.pair for item in items], range(len(items)), progress)
    tokens = sum(score.tokens for score in scores)
    error = sum(score.standard_error**2 for score in scores) ** 0.5
    return {
        "responses": [{"text": item.text, **asdict(score)} for item, score in zip(items, scores, strict=True)],
        "tokens": tokens,
        "log_likelihood_per_token": sum(score.log_likelihood for score in scores) / tokens,
        "standard_error": error / tokens,
    }


def score_questions(estimator: MaskLikelihoods, items: Sequence[Question], progress: bool = False) -> dict[str, Any]:
    """The most likely choice of every question, and the share of right ones with Wilson's 95 % interval.

    `accuracy` compares log-likelihoods, and `accuracy_norm` log-likelihoods divided by the choices' characters.
    """
    pairs = [pair for question in items for pair in question.pairs]
    groups = [number for number, question in enumerate(items) for _ in question.choices]
    likelihoods = iter(estimator.score(pairs, groups, progress))
    questions = []
    for question in items:
        scores = [next(likelihoods) for _ in question.choices]
        sums = [score.log_likelihood for score in scores]
        by_character = [value / len(choice) for value, choice in zip(sums, question.choices, strict=True)]
        questions.append(
            {
                "prompt": question.prompt,
                "answer": question.answer,
                "chosen": sums.index(max(sums)),
                "chosen_norm": by_character.index(max(by_character)),
                "choices": [
                    {"text": choice, **asdict(score)} for choice, score in zip(question.choices, scores, strict=True)
                ],
            }
        )
    result: dict[str, Any] = {"questions": questions}
    for name, chosen in (("accuracy", "chosen"), ("accuracy_norm", "chosen_norm")):
        right = sum(question[chosen] == question["answer"] for question in questions)
        result[name] = right / len(questions)
        result[f"{name}_interval"] = list(wilson(right, len(questions)))
    return result


def check_kind(name: str, kind: ModelKind) -> None:
    """Raise `ConfigError` or `UnknownNameError` where likelihoods of models of this `kind` are not estimated."""
    if kind == "uniform":
        raise UnknownNameError("subject", "likelihood of uniform models", ())
    if kind != "masked":
        raise ConfigError(
            f"likelihoods are bounds of masked models, and {name!r} is a {kind} model, whose bound has another formula"
        )
