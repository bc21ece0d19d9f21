"""The answers to decisions, in OpenAI's form and in System One's. Fields of our own begin with `x_`."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from remask.server.answers.base import Answer, Work, doc
from remask.server.answers.responses import ResponseUsage


class ReadWork(Work):
    """The work of decisions."""

    reads: Annotated[int, doc("Canvases that were read.")]
    together: Annotated[bool, doc("Whether all questions stood on one canvas.")]
    calibrated: bool


class More(Answer):
    """What answers of both APIs have beside their own fields."""

    x_label_mass: NotRequired[Annotated[float, doc("The probability that the model gives to the labels at all.")]]
    x_entropy: NotRequired[Annotated[float, doc("Of the probabilities, in nats.")]]
    x_labels: NotRequired[Annotated[list[str], doc("What the model would have written for each alternative.")]]


class _Answered(More):
    confidence: NotRequired[Annotated[float, doc("From 0 to 1, as the page on decisions defines it.")]]
    score: NotRequired[Annotated[float, doc("The expected level, counted from 0.")]]
    number: NotRequired[Annotated[int, doc("The most probable one.")]]
    mean: NotRequired[Annotated[float, doc("The expected number.")]]


class SystemOneDecision(_Answered):
    """The answer to one question of `/v1/systemone`, with the fields of its type."""

    type: Literal["choice", "score", "noul", "yes_no", "predicate", "number"]
    noul: NotRequired[Annotated[float, doc("The probability of yes.")]]
    choice: NotRequired[Annotated[str, doc("The most probable name.")]]
    legend: NotRequired[Annotated[dict[str, Any], doc("The levels of a score, by their numbers.")]]
    probabilities: NotRequired[Annotated[dict[str, float], doc("By name, level or number.")]]


class SystemOneUsage(Answer):
    """Tokens of the prompts that were read; none are written."""

    input_tokens: int
    output_tokens: int


class SystemOneAnswer(Answer):
    """Answers by the ids of their questions."""

    model: str
    answers: dict[str, SystemOneDecision]
    usage: SystemOneUsage
    x_remask: ReadWork


class OptionShare(Answer):
    """The probability of a choice, a level or a number."""

    value: str | bool | int
    label: NotRequired[Annotated[str, doc("Of a level.")]]
    probability: float


class OpenAIDecision(_Answered):
    """The answer to one question of `/v1/decisions`, with the fields of its type; of a refusal only its name."""

    type: Literal["choice", "score", "predicate", "refusal", "noul", "yes_no", "number"]
    name: str | None
    probability: NotRequired[Annotated[float, doc("That the predicate is true.")]]
    choice: NotRequired[Annotated[str | bool, doc("The most probable value.")]]
    probabilities: NotRequired[list[OptionShare]]


class DecisionsAnswer(Answer):
    """Answers in the order of their questions."""

    model: str
    answers: list[OpenAIDecision]
    usage: ResponseUsage
    x_remask: ReadWork


DecisionsOrSystemOne: TypeAlias = DecisionsAnswer | SystemOneAnswer
"""An answer of `/v1/decisions`: to a body with `input` the former, to one with `state` the latter."""
