"""Cards of the bundled models: for people, a sentence on what a model can answer, and questions with right answers."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from remask.tasks import page, relay, tariff, transit

QUESTION_COUNT: Final = 3  # questions that a card shows
_PROMPT_SEED: Final = 20  # of the system prompt, which all questions of a model share
_OPTION_COUNT: Final = 4  # of a decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A question in three forms: with its answer, as an answer with holes, and as a decision."""

    question: str  # the user's turn
    answer: str  # the only right answer; empty if there are many
    canvas: str  # the answer with holes; `[[n]]` is a hole of n tokens
    decision: Mapping[str, Any] | None  # a question of `POST /v1/decisions`; None if the model takes none


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The card of one model."""

    answers: str  # a sentence on what the model can answer
    system: str  # the system prompt of all questions; empty without one
    draw: Callable[[int], Exercise]  # returns the question of a number, from 0 on
    alone: bool = True  # the model answers single questions of the forms of these; else conversations may go on

    @property
    def questions(self) -> tuple[Exercise, ...]:
        """The questions that the card shows."""
        return tuple(map(self.draw, range(QUESTION_COUNT)))

    def messages(self, question: Exercise) -> list[dict[str, str]]:
        """The conversation that asks `question`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": question.question}]

    def as_json(self) -> dict[str, Any]:
        """The card as JSON values."""
        questions = [asdict(question) for question in self.questions]
        return {"answers": self.answers, "system": self.system, "alone": self.alone, "questions": questions}


def card(model: str) -> Card | None:
    """The card of the bundled model of this name; None for other names."""
    return _CARDS[model]() if model in _CARDS else None


def _tariff() -> Card:
    """The card of the model of the tariff task. Its questions are of all kinds in turn."""
    prompt = tariff.draw_prompt(random.Random(_PROMPT_SEED), tariff.TariffSettings())

    def draw(number: int) -> Exercise:
        """The question of a number. Its canvas and its decision give all items, and leave the names open."""
        kind = tariff.KINDS[number % len(tariff.KINDS)]
        question = tariff.draw_question(random.Random(number), prompt, kind)
        names = tariff.expected_names(prompt, question)
        first, *others = question.items
        template = " ".join([f"{first} {{answer}}", *(f"{item}{{mask}}" for item in others)])
        return Exercise(
            question=question.text,
            answer=tariff.reference_response(prompt, question),
            # The space before a name is part of its token.
            canvas=" ".join([f"{first} {names[0]}", *(f"{item}[[1]]" for item in others)]),
            decision=_decision(question.text, names, template),
        )

    return Card(
        answers="A demonstration model: it answers who ordered four things of the list in its system prompt, and who "
        "pays four prices under a plan. It knows questions of exactly these forms and answers nonsense to all others.",
        system=prompt.text,
        draw=draw,
    )


def _relay(*, first: int = 0, decides: bool = True) -> Card:
    """The card of a model of the relay task. Question 0 is drawn with the seed `first`."""
    prompt = relay.draw_prompt(random.Random(_PROMPT_SEED), relay.RelaySettings())

    def draw(number: int) -> Exercise:
        question = relay.draw_question(random.Random(first + number), prompt)
        towns = relay.route(prompt, question)
        template = "{answer}" + "{mask}" * (len(towns) - 1)
        return Exercise(
            question=question.text,
            answer=relay.reference_response(prompt, question),
            # The space before a town is part of its token.
            canvas="".join([towns[0], "[[1]]" * (len(towns) - 1)]),
            decision=_decision(question.text, towns[:_OPTION_COUNT], template) if decides else None,
        )

    return Card(
        answers="A demonstration model: it answers which six towns a route leads through, by the list of goods in its "
        "system prompt and a season. It knows questions of exactly this form and answers nonsense to all others.",
        system=prompt.text,
        draw=draw,
    )


def _transit() -> Card:
    """The card of the model of the transit task."""
    prompt = transit.draw_prompt(random.Random(_PROMPT_SEED))

    def draw(number: int) -> Exercise:
        question = transit.draw_question(random.Random(number), prompt)
        stops = transit.route(prompt, question)
        others = [stop for stop, _ in prompt.rows if stop not in stops][: _OPTION_COUNT - 1]
        return Exercise(
            question=question.text,
            answer=transit.reference_response(prompt, question),
            canvas=f"{stops[0]} > {'[[1]] > ' * (len(stops) - 2)}[[1]] ## [[1]]",
            decision=_decision(question.text, [stops[1], *others], f"{stops[0]} > {{answer}}"),
        )

    return Card(
        answers="A demonstration model: it answers where one to three stops lead on the line in its system prompt. It "
        "knows questions of exactly this form and answers nonsense to all others.",
        system=prompt.text,
        draw=draw,
    )


def _decision(question: str, names: Sequence[str], template: str) -> dict[str, Any]:
    """The decision which of `names` is at `{answer}`. Options are not shown, as the model knows no letters for them."""
    return {
        "instructions": question,
        "criteria": sorted(names),
        "labels": "names",
        "show_options": False,
        "template": template,
    }


def _smollm2(*, is_block_causal: bool = False) -> Card:
    """The card with the page and questions of `remask demo`."""
    questions = page.demo_questions()

    def draw(number: int) -> Exercise:
        item = questions[page.CARD_QUESTIONS[number % len(page.CARD_QUESTIONS)]]
        before, _, after = item.answer.partition(item.fact)
        # A block-causal model sees nothing behind the block of a hole, so its canvas ends with the hole.
        canvas = f"{before}[[1-16]]" if is_block_causal else f"{before}[[1-16]]{after}"
        return Exercise(question=item.question, answer=item.answer, canvas=canvas, decision=None)

    form = ", which writes blocks of eight tokens and answers much as SmolLM2 does" if is_block_causal else ""
    return Card(
        answers=f"SmolLM2-135M, made a diffusion model{form}: good for looking up what stands on a page that you give "
        "it. It knows little of the world, and what it says of that is often wrong.",
        system=questions[0].system,
        draw=draw,
        alone=False,
    )


_CARDS: Final[Mapping[str, Callable[[], Card]]] = MappingProxyType(
    {
        "smollm2": _smollm2,
        "smollm2-blocks": partial(_smollm2, is_block_causal=True),
        "bundled": _relay,
        "bundled-tariff": _tariff,
        "bundled-transit": _transit,
        # From question 4 on, as many as a card shows are answered right from each of 40 noises.
        "bundled-uniform": partial(_relay, first=4, decides=False),
    }
)
