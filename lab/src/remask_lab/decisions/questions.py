"""Questions with one right answer each, about pages of the town task and about invented messages of customers.

Half of a workload is about pages, and half about messages; half are yes-or-no questions, and half choices of three to
six. About as many answers are yes as no. All draws come from a `random.Random`, so a seed fixes a workload.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from remask.tasks.town import DAYS, Shop, draw_page, page_text

SHOPS: Final = 6
"""Shops of a page, which has some 200 tokens with a question."""
PER_STATE: Final = 4
"""Questions of each type about one page or message."""

_TROUBLES: Final = {
    "Billing": (
        ("I was charged twice for my {month} invoice.", "the customer was charged twice"),
        ("My card was billed {sum} dollars after I had cancelled.", "the customer was billed after a cancellation"),
        ("The invoice for {month} shows the wrong amount.", "an invoice shows a wrong amount"),
    ),
    "Delivery": (
        ("My parcel has not arrived, though it was due {days} days ago.", "a parcel is late"),
        ("The courier left my parcel at the wrong house.", "a parcel went to the wrong house"),
        ("Only one of the {days} boxes that I ordered has come.", "boxes are missing"),
    ),
    "Technical": (
        ("The app crashes every time I open my photos.", "the app crashes"),
        ("I cannot log in since the update of {month}.", "the customer cannot log in"),
        ("The export to a spreadsheet stops with an error.", "an export fails"),
    ),
    "Sales": (
        ("I would like to know what the larger plan costs for {days} people.", "the customer asks for a price"),
        ("We think of buying {days} more seats; is there a discount?", "the customer asks for a discount"),
    ),
}
_TEAMS: Final = {
    "Billing": "Payments, invoices and charges",
    "Delivery": "Parcels that are late, lost or incomplete",
    "Technical": "Errors, crashes and trouble with logging in",
    "Sales": "Prices, discounts and new contracts",
}
_REFUNDS: Final = ("Please give me my money back.", "I want a refund.", "Please refund the charge.")
_CHANNELS: Final = {
    "by phone": "Please call me about it.",
    "by email": "Please answer by email.",
    "by letter": "Please write me a letter.",
}
_MONTHS: Final = ("January", "March", "May", "August", "October")


@dataclass(frozen=True, slots=True)
class KnownQuestion:
    """A question in the fields of `Decisions`, the text that it is about, and the right answer.

    Attributes:
        state_number: equal for questions about one state.
        answer: the name of a choice, or "yes" or "no".
    """

    state_number: int
    state: str
    question: dict[str, Any]
    answer: str


Questions: TypeAlias = Iterator[tuple[dict[str, Any], str]]
"""Questions of one type about one state without end, each with its answer."""


def draw(count: int, seed: int, per_state: int = PER_STATE) -> list[KnownQuestion]:
    """`count` questions, alternately yes-or-no and choices, `per_state` of either about one state."""
    rng, questions = random.Random(seed), list[KnownQuestion]()
    number = 0
    while len(questions) < count:
        state, types = (_page, _message)[number % 2](rng)
        for index in range(2 * per_state):
            question, answer = next(types[index % 2])
            questions.append(KnownQuestion(state_number=number, state=state, question=question, answer=answer))
        number += 1
    return questions[:count]


def _page(rng: random.Random) -> tuple[str, tuple[Questions, Questions]]:
    """A page of shops, and yes-or-no questions and choices about it."""
    shops = draw_page(rng, SHOPS)

    def text(shop: Shop, other: Shop, *, true: bool) -> str:
        """A question about a value of `shop`, or if it is not `true` about a wrong value, such as that of `other`."""
        days = [day for day in DAYS if day != shop.shut]
        return rng.choice(
            [
                f"Is the {shop.name} in {(shop if true else other).street}?",
                f"Does the {shop.name} open at {shop.opens if true else shop.opens + rng.randint(1, 4)}?",
                f"Does the {shop.name} close at {shop.closes if true else shop.closes - rng.randint(1, 4)}?",
                f"Is the {shop.name} shut on {shop.shut if true else rng.choice(days)}?",
            ]
        )

    def yes_no() -> Questions:
        """Yield pairs of a true and a false statement as questions, in random order."""
        while True:
            for true in rng.sample([True, False], 2):
                shop, other = rng.sample(shops, 2)
                yield {"type": "yes_no", "instructions": text(shop, other, true=true)}, "yes" if true else "no"

    def choice() -> Questions:
        """Yield questions with three to five choices, one of which the page names."""
        while True:
            shop, *others = rng.sample(shops, 5)
            days = [day for day in DAYS if day != shop.shut]
            question, answer, wrong = rng.choice(
                [
                    (f"In which street is the {shop.name}?", shop.street, [other.street for other in others]),
                    (f"What is in {shop.street}?", f"the {shop.name}", [f"the {other.name}" for other in others]),
                    (f"On which day is the {shop.name} shut?", shop.shut, days[:4]),
                ]
            )
            names = [answer, *rng.sample(wrong, rng.randint(2, 4))]
            rng.shuffle(names)
            yield {"type": "choice", "instructions": question, "criteria": dict.fromkeys(names)}, answer

    return page_text(shops), (yes_no(), choice())


def _message(rng: random.Random) -> tuple[str, tuple[Questions, Questions]]:
    """A customer's message about one trouble, and yes-or-no questions and choices about it."""
    team = rng.choice([*_TROUBLES])
    sentence, summary = rng.choice(_TROUBLES[team])
    refund = rng.random() < 0.5
    channel = rng.choice([*_CHANNELS])
    trouble = sentence.format(month=rng.choice(_MONTHS), sum=rng.randint(5, 90), days=rng.randint(3, 9))
    sentences = [trouble, *([rng.choice(_REFUNDS)] if refund else []), _CHANNELS[channel]]
    state = f"Hello, this is about order {rng.randint(1000, 9999)}. {' '.join(sentences)} Kind regards"
    others = [other for troubles in _TROUBLES.values() for _, other in troubles if other != summary]
    other_channels = [other for other in _CHANNELS if other != channel]

    def yes_no() -> Questions:
        """Yield questions about refund, trouble and channel in random order; half of the claims are true."""
        while True:
            claim = rng.choice([summary, rng.choice(others)])
            claimed_channel = rng.choice([channel, rng.choice(other_channels)])
            questions = [
                ("Is the customer asking for money back?", refund),
                (f"Is it true that {claim}?", claim == summary),
                (f"Does the customer want an answer {claimed_channel}?", claimed_channel == channel),
            ]
            for text, true in rng.sample(questions, 3):
                yield {"type": "yes_no", "instructions": text}, "yes" if true else "no"

    def choice() -> Questions:
        """Yield questions about team, channel and trouble, with their choices in random order."""
        while True:
            summaries = [summary, *rng.sample(others, 3)]
            questions: tuple[tuple[str, dict[str, Any], str], ...] = (
                ("Which team should handle this message?", {**_TEAMS}, team),
                ("How does the customer want to be answered?", dict.fromkeys(_CHANNELS), channel),
                ("What is the message about?", dict.fromkeys(summaries), summary),
            )
            for text, criteria, answer in questions:
                shuffled = dict(rng.sample([*criteria.items()], len(criteria)))
                yield {"type": "choice", "instructions": text, "criteria": shuffled}, answer

    return state, (yes_no(), choice())
