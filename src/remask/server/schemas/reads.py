"""Answers of decisions, scores and rankings."""

from typing import Literal

from remask.server.schemas.base import Answer, Usage, Work, left_out


class Decided(Answer):
    """The answer to one question."""

    type: Literal["choice", "yes_no", "noul", "number", "score"]
    choice: str
    """The most probable alternative."""
    value: float = left_out()
    """The probability of yes, the most probable number, or the expected level, counted from 1."""
    mean: float = left_out()
    """The expected number."""
    noul: float = left_out()
    """The same as `value`, of the type `noul`."""
    score: float = left_out()
    """The same as `value`, of the type `score`."""
    legend: dict[str, str] = left_out()
    """Of a score: the level that each label stands for."""
    probabilities: dict[str, float]
    confidence: float
    """The probability of `choice`."""
    label_mass: float
    """The probability that the model gives to the labels at all."""
    entropy: float
    """Of the probabilities, in nats."""
    labels: dict[str, str]
    """What the model would have written for each alternative."""


class ReadWork(Work):
    """The work of decisions."""

    reads: int
    """Canvases that were read."""


class DecisionsAnswer(Answer):
    """Answers by the ids of their questions."""

    id: str
    object: Literal["decisions"]
    created: int
    model: str
    answers: dict[str, Decided]
    together: bool
    calibrated: bool
    usage: Usage
    remask: ReadWork


class ReadUsage(Answer):
    """Tokens of the prompts that were read."""

    prompt_tokens: int
    total_tokens: int


class Score(Answer):
    """How well a document answers a query: a probability."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(Answer):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ReadUsage


class RankedText(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document and its score. `index` is its place in the request."""

    index: int
    document: RankedText
    relevance_score: float


class RerankAnswer(Answer):
    """Documents, the best first."""

    id: str
    model: str
    usage: ReadUsage
    results: list[Ranked]
