"""The look-up task: questions about pages of other kinds than the town's, which no model here was trained on.

A page is a list of an office's people, a timetable or a collection of recipes, and a question asks for one thing that
it says. `written` says by whom: pages and questions are drawn afresh, or they are those of `lookup.toml`, which were
written by hand. An answer is free in its form: it is right where it names what was asked for, and nothing else of its
kind that the page names and the question does not.
"""

import random
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, zip_longest
from pathlib import Path
from typing import ClassVar, Final

from remask.checks.fields import declare
from remask.checks.values import Choice, Whole
from remask.errors import ConfigError
from remask.tasks.workload import Message, TaskSettings, check_counts, deal

GENERATED, BY_HAND = "generated", "by-hand"
FILE: Final = Path(__file__).with_name("lookup.toml")
SAMPLING: Final = {"max_tokens": 16, "block_length": 16}
"""The sampling parameters of an answer: a sentence."""

# fmt: off
PEOPLE: Final = (
    "Agnes", "Bruno", "Carla", "Daniel", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leon", "Marta",
    "Nils", "Olga", "Paul", "Rosa", "Simon", "Tessa", "Ulla", "Victor", "Wanda", "Xenia", "Yusuf", "Zoe",
)
TEAMS: Final = (
    "accounts", "archives", "catering", "contracts", "design", "exports", "housing", "insurance", "logistics", "media",
    "payroll", "planning", "research", "sales", "security", "training", "translation", "transport",
)
CITIES: Final = (
    "Aachen", "Basel", "Bergen", "Bologna", "Cork", "Dresden", "Gdansk", "Ghent", "Graz", "Krakow", "Leeds", "Lille",
    "Lugano", "Malmo", "Nantes", "Odense", "Porto", "Seville", "Tampere", "Toulouse", "Trieste", "Utrecht", "York",
)
DISHES: Final = (
    "apple cake", "barley soup", "bean stew", "beef pie", "carrot salad", "cheese tart", "chicken curry", "corn bread",
    "fish soup", "fried rice", "lamb roast", "leek pie", "lentil soup", "mushroom risotto", "onion tart", "pea soup",
    "pumpkin soup", "rice pudding", "spinach pie", "tomato pasta",
)
FOODS: Final = (
    "almonds", "basil", "butter", "chives", "cinnamon", "cream", "cumin", "garlic", "ginger", "honey", "lemon", "mint",
    "mustard", "nutmeg", "olives", "paprika", "parsley", "pepper", "raisins", "rosemary", "saffron", "sage", "thyme",
    "vinegar",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class LookupSettings(TaskSettings):
    """Who wrote the pages, and how long drawn ones are. A bad setting raises `ConfigError`, which names it."""

    written: str = declare(GENERATED, Choice((GENERATED, BY_HAND)), "How pages and questions came to be.")
    entries: int = declare(5, Whole(4, 16), "People, trains or dishes on a drawn page.")

    task: ClassVar[str] = "lookup"


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and all that it names, by kind: rooms, times, people."""

    topic: str
    text: str
    values: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """One question about a page; `asked` is what the answer must name, and `others` what it must not."""

    page: Page
    question: str
    asked: str
    others: tuple[str, ...]

    @property
    def messages(self) -> list[Message]:
        """The chat messages to send; the page is shared by all requests about it."""
        return [{"role": "system", "content": self.page.text}, {"role": "user", "content": self.question}]


def is_correct(request: LookupRequest, text: str) -> bool:
    """Whether the response names what was asked for and none of the others."""
    return _names(text, request.asked) and not any(_names(text, other) for other in request.others)


def _names(text: str, value: str) -> bool:
    """Whether a value stands in a text as whole words, in any case: 9:05 does not name 9, nor does 12 name 2."""
    return re.search(rf"(?<![\w:.]){re.escape(value)}(?!\w|[:.]\d)", text, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class _Topic:
    """What pages of one topic are drawn from.

    Attributes:
        opening, entry: a sentence, then one for each entry with what the entry names.
        draw: so many entries, each with what it names.
        questions: what an answer names, and the question with what the entry names.
    """

    opening: str
    entry: str
    draw: Callable[[random.Random, int], list[dict[str, str]]]
    questions: Sequence[tuple[str, str]]


def _people(rng: random.Random, count: int) -> list[dict[str, str]]:
    columns = (rng.sample(PEOPLE, count), rng.sample(TEAMS, count), rng.sample(range(101, 340), count))
    extensions = rng.sample(range(20, 100), count)
    return _entries(("person", "team", "room", "extension"), *columns, extensions)


def _trains(rng: random.Random, count: int) -> list[dict[str, str]]:
    times = rng.sample(range(72, 264), 2 * count)  # of five minutes, from six to ten in the evening
    pairs = [sorted(times[place : place + 2]) for place in range(0, 2 * count, 2)]
    leaves, arrives = ([f"{time // 12}:{5 * (time % 12):02d}" for time in each] for each in zip(*pairs, strict=True))
    platforms = rng.sample(range(1, 24), count)
    return _entries(("city", "leaves", "arrives", "platform"), rng.sample(CITIES, count), leaves, arrives, platforms)


def _dishes(rng: random.Random, count: int) -> list[dict[str, str]]:
    minutes, serves = rng.sample(range(15, 120, 5), count), [rng.randint(2, 12) for _ in range(count)]
    return _entries(
        ("dish", "food", "minutes", "serves"), rng.sample(DISHES, count), rng.sample(FOODS, count), minutes, serves
    )


def _entries(kinds: Sequence[str], *columns: Sequence[object]) -> list[dict[str, str]]:
    return [dict(zip(kinds, map(str, values), strict=True)) for values in zip(*columns, strict=True)]


TOPICS: Final[Mapping[str, _Topic]] = {
    "offices": _Topic(
        "These people work on our floor.",
        "{person} of the {team} team sits in room {room} and answers extension {extension}.",
        _people,
        (
            ("room", "Which room does {person} sit in?"),
            ("extension", "Which extension does {person} answer?"),
            ("person", "Who sits in room {room}?"),
            ("team", "Which team does {person} belong to?"),
        ),
    ),
    "timetable": _Topic(
        "This is the timetable of our station.",
        "The train to {city} leaves platform {platform} at {leaves} and arrives at {arrives}.",
        _trains,
        (
            ("platform", "Which platform does the train to {city} leave from?"),
            ("leaves", "What time does the train to {city} leave?"),
            ("arrives", "What time does the train to {city} arrive?"),
            ("city", "Where does the train from platform {platform} go?"),
        ),
    ),
    "recipes": _Topic(
        "These dishes are in our cookbook.",
        "The {dish} is seasoned with {food}, takes {minutes} minutes and serves {serves}.",
        _dishes,
        (
            ("minutes", "How many minutes does the {dish} take?"),
            ("serves", "How many people does the {dish} serve?"),
            ("food", "What is the {dish} seasoned with?"),
            ("dish", "Which dish is seasoned with {food}?"),
        ),
    ),
}
"""The topics of drawn pages. No two entries of a page share what a question finds them by."""


def make_workload(requests: int, pages: int, seed: int, settings: LookupSettings | None = None) -> list[LookupRequest]:
    """Questions over `pages` pages, shuffled, of topics that are dealt out evenly; a seed fixes them.

    Raises `ConfigError` where so many were not written by hand.
    """
    settings, rng = settings or LookupSettings(), random.Random(seed)
    if settings.written == BY_HAND:
        return _by_hand(rng, requests, pages)
    topics = cycle(TOPICS)
    dealt = deal(rng, requests, pages, lambda each: _draw_page(each, next(topics), settings.entries), _ask)
    return [question for _, _, question in dealt]


def _draw_page(rng: random.Random, topic: str, count: int) -> tuple[Page, list[dict[str, str]]]:
    kind = TOPICS[topic]
    entries = kind.draw(rng, count)
    values = {name: [entry[name] for entry in entries] for name in entries[0]}
    text = " ".join([kind.opening, *(kind.entry.format(**entry) for entry in entries)])
    return Page(topic, text, values), entries


def _ask(rng: random.Random, drawn: tuple[Page, list[dict[str, str]]], _: object) -> LookupRequest:
    page, entries = drawn
    (kind, question), entry = rng.choice(TOPICS[page.topic].questions), rng.choice(entries)
    return _request(page, question.format(**entry), kind, entry[kind])


def _by_hand(rng: random.Random, requests: int, pages: int) -> list[LookupRequest]:
    """The first questions about each of the first pages."""
    check_counts(requests, pages)
    written = read_pages()
    chosen = [question for turn in zip_longest(*written[:pages]) for question in turn if question is not None]
    if pages > len(written) or requests > len(chosen):
        raise ConfigError(
            f"{requests} questions about {pages} pages were not written by hand: there are {len(written)} pages, and "
            f"{len(chosen)} questions about the first {min(pages, len(written))}; ask for fewer, or for generated ones"
        )
    chosen = chosen[:requests]
    rng.shuffle(chosen)
    return chosen


@cache
def read_pages() -> list[list[LookupRequest]]:
    """The questions about each page that was written by hand."""
    found = []
    for each in tomllib.loads(FILE.read_text(encoding="utf-8"))["pages"]:
        page = Page(each["topic"], " ".join(each["text"].split()), each["values"])
        found.append([_request(page, question, kind, asked) for question, kind, asked in each["questions"]])
    return found


def _request(page: Page, question: str, kind: str, asked: str) -> LookupRequest:
    """A question whose answer is of a kind: it may name nothing else of it that the question does not name."""
    values = dict.fromkeys(page.values[kind])
    others = (value for value in values if value != asked and not _names(question, value))
    return LookupRequest(page, question, asked, tuple(others))
