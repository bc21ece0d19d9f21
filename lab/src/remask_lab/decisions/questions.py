"""Questions with one right answer each: of pages of the town task, and of messages that customers might send.

Half of a workload is about pages, half about messages, and half of it is yes or no, half a choice of three to six. As
many answers are yes as no. All draws come from a `random.Random`, so a seed fixes a workload.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from remask.tasks.town import DAYS, Shop, draw_page, page_text

SHOPS: Final = 6
"""Shops of a page: with its question some 200 tokens."""
A_PAGE: Final = 4
"""Questions of each form about one page or message."""

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
    """A question of `Decisions`, the state that it is about, and its answer: the name of a choice, or yes or no."""

    about: int
    state: str
    question: dict[str, Any]
    answer: str


def draw(count: int, seed: int, apiece: int = A_PAGE) -> list[KnownQuestion]:
    """`count` questions, of which yes or no and choices take turns; `apiece` of each about one state."""
    rng, questions = random.Random(seed), list[KnownQuestion]()
    about = 0
    while len(questions) < count:
        state, makers = (_page, _message)[about % 2](rng)
        for place in range(2 * apiece):
            question, answer = next(makers[place % 2])
            questions.append(KnownQuestion(about, state, question, answer))
        about += 1
    return questions[:count]


def _page(rng: random.Random) -> tuple[str, tuple[Iterator[tuple[dict[str, Any], str]], ...]]:
    shops = draw_page(rng, SHOPS)

    def facts(shop: Shop, other: Shop, *, true: bool) -> str:
        told = shop if true else other
        return rng.choice(
            [
                f"Is the {shop.name} in {told.street}?",
                f"Does the {shop.name} open at {shop.opens if true else shop.opens + rng.randint(1, 4)}?",
                f"Does the {shop.name} close at {shop.closes if true else shop.closes - rng.randint(1, 4)}?",
                f"Is the {shop.name} shut on {shop.shut if true else rng.choice([d for d in DAYS if d != shop.shut])}?",
            ]
        )

    def yes_no() -> Iterator[tuple[dict[str, Any], str]]:
        while True:
            for true in rng.sample([True, False], 2):
                shop, other = rng.sample(shops, 2)
                yield {"type": "yes_no", "instructions": facts(shop, other, true=true)}, "yes" if true else "no"

    def choice() -> Iterator[tuple[dict[str, Any], str]]:
        while True:
            shop, *others = rng.sample(shops, 5)
            text, answer, wrong = rng.choice(
                [
                    (f"In which street is the {shop.name}?", shop.street, [each.street for each in others]),
                    (f"What is in {shop.street}?", f"the {shop.name}", [f"the {each.name}" for each in others]),
                    (f"On which day is the {shop.name} shut?", shop.shut, [d for d in DAYS if d != shop.shut][:4]),
                ]
            )
            names = [answer, *rng.sample(wrong, rng.randint(2, 4))]
            rng.shuffle(names)
            yield {"type": "choice", "instructions": text, "criteria": dict.fromkeys(names)}, answer

    return page_text(shops), (yes_no(), choice())


def _message(rng: random.Random) -> tuple[str, tuple[Iterator[tuple[dict[str, Any], str]], ...]]:
    team = rng.choice([*_TROUBLES])
    trouble, meant = rng.choice(_TROUBLES[team])
    refund = rng.random() < 0.5
    channel = rng.choice([*_CHANNELS])
    filled = trouble.format(month=rng.choice(_MONTHS), sum=rng.randint(5, 90), days=rng.randint(3, 9))
    sentences = [filled, *([rng.choice(_REFUNDS)] if refund else []), _CHANNELS[channel]]
    number = rng.randint(1000, 9999)
    state = f"Hello, this is about order {number}. {' '.join(sentences)} Kind regards"
    problems = [says for listed in _TROUBLES.values() for _, says in listed]

    def yes_no() -> Iterator[tuple[dict[str, Any], str]]:
        while True:
            said = rng.choice([meant, rng.choice([each for each in problems if each != meant])])
            other = rng.choice([channel, rng.choice([each for each in _CHANNELS if each != channel])])
            for text, true in rng.sample(
                [
                    ("Is the customer asking for money back?", refund),
                    (f"Is it true that {said}?", said == meant),
                    (f"Does the customer want an answer {other}?", other == channel),
                ],
                3,
            ):
                yield {"type": "yes_no", "instructions": text}, "yes" if true else "no"

    def choice() -> Iterator[tuple[dict[str, Any], str]]:
        while True:
            names = [meant, *rng.sample([each for each in problems if each != meant], 3)]
            forms: tuple[tuple[str, dict[str, Any], str], ...] = (
                ("Which team should handle this message?", {**_TEAMS}, team),
                ("How does the customer want to be answered?", dict.fromkeys(_CHANNELS), channel),
                ("What is the message about?", dict.fromkeys(names), meant),
            )
            for text, criteria, answer in forms:
                shuffled = dict(rng.sample([*criteria.items()], len(criteria)))
                yield {"type": "choice", "instructions": text, "criteria": shuffled}, answer

    return state, (yes_no(), choice())
