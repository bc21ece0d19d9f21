"""The look-up task: questions about pages of kinds that no model here was trained on.

A page is a list of an office's people, a timetable or a collection of recipes, and a question asks for one value on it.
The setting `written` chooses between pages and questions that are drawn at random and those of `lookup.toml`, which
were written by hand. An answer may have any form: it is right if it names the value, and no other value of the page of
the same kind, unless the question names it.
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
    """How pages are written, and how long drawn ones are. A bad setting raises `ConfigError`, which names it."""

    written: str = declare(GENERATED, Choice((GENERATED, BY_HAND)), "How pages and questions came to be.")
    entries: int = declare(5, Whole(4, 16), "People, trains or dishes on a drawn page.")

    task: ClassVar[str] = "lookup"


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and the values on it by kind, such as rooms, times or people."""

    topic: str
    text: str
    values: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """One question about a page: an answer must name `value`, and must not name any of `others`."""

    page: Page
    question: str
    value: str
    others: tuple[str, ...]

    @property
    def messages(self) -> list[Message]:
        """The chat messages to send; the page is shared by all requests about it."""
        return [{"role": "system", "content": self.page.text}, {"role": "user", "content": self.question}]


def is_correct(request: LookupRequest, text: str) -> bool:
    """Whether the response `text` names the value and none of the others."""
    return _names(text, request.value) and not any(_names(text, other) for other in request.others)


def _names(text: str, value: str) -> bool:
    """Whether `text` has `value` as whole words, in any case: 9:05 does not name 9, nor does 12 name 2."""
    return re.search(rf"(?<![\w:.]){re.escape(value)}(?!\w|[:.]\d)", text, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Topic:
    """The texts and values that pages of one topic are drawn from.

    Attributes:
        opening: the first sentence of a page.
        entry: the sentence of an entry, a format of its values by kind.
        draw: draws a number of entries, each its values by kind.
        questions: the kind of value that a question asks for, and the question, a format of the entry's values by kind.
    """

    opening: str
    entry: str
    draw: Callable[[random.Random, int], list[dict[str, str]]]
    questions: Sequence[tuple[str, str]]


def _people(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Draw people with teams, rooms and extensions, none of which two people share."""
    columns = (rng.sample(PEOPLE, count), rng.sample(TEAMS, count), rng.sample(range(101, 340), count))
    extensions = rng.sample(range(20, 100), count)
    return _entries(("person", "team", "room", "extension"), *columns, extensions)


def _trains(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Draw trains with cities, platforms and times between 6:00 and 22:00, none of which two trains share."""
    slots = rng.sample(range(6 * 12, 22 * 12), 2 * count)  # of five minutes, twelve an hour
    pairs = [sorted(slots[number : number + 2]) for number in range(0, 2 * count, 2)]
    leaves, arrives = ([f"{slot // 12}:{5 * (slot % 12):02d}" for slot in times] for times in zip(*pairs, strict=True))
    platforms = rng.sample(range(1, 24), count)
    return _entries(("city", "leaves", "arrives", "platform"), rng.sample(CITIES, count), leaves, arrives, platforms)


def _dishes(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Draw dishes with seasonings, minutes and servings; several dishes may serve as many."""
    minutes = rng.sample(range(15, 120, 5), count)
    serves = [rng.randint(2, 12) for _ in range(count)]
    dishes = rng.sample(DISHES, count)
    return _entries(("dish", "food", "minutes", "serves"), dishes, rng.sample(FOODS, count), minutes, serves)


def _entries(kinds: Sequence[str], *columns: Sequence[object]) -> list[dict[str, str]]:
    """Entries from the values of each kind, one column for each of `kinds`."""
    return [dict(zip(kinds, map(str, values), strict=True)) for values in zip(*columns, strict=True)]


TOPICS: Final[Mapping[str, _Topic]] = {
    "offices": _Topic(
        opening="These people work on our floor.",
        entry="{person} of the {team} team sits in room {room} and answers extension {extension}.",
        draw=_people,
        questions=(
            ("room", "Which room does {person} sit in?"),
            ("extension", "Which extension does {person} answer?"),
            ("person", "Who sits in room {room}?"),
            ("team", "Which team does {person} belong to?"),
        ),
    ),
    "timetable": _Topic(
        opening="This is the timetable of our station.",
        entry="The train to {city} leaves platform {platform} at {leaves} and arrives at {arrives}.",
        draw=_trains,
        questions=(
            ("platform", "Which platform does the train to {city} leave from?"),
            ("leaves", "What time does the train to {city} leave?"),
            ("arrives", "What time does the train to {city} arrive?"),
            ("city", "Where does the train from platform {platform} go?"),
        ),
    ),
    "recipes": _Topic(
        opening="These dishes are in our cookbook.",
        entry="The {dish} is seasoned with {food}, takes {minutes} minutes and serves {serves}.",
        draw=_dishes,
        questions=(
            ("minutes", "How many minutes does the {dish} take?"),
            ("serves", "How many people does the {dish} serve?"),
            ("food", "What is the {dish} seasoned with?"),
            ("dish", "Which dish is seasoned with {food}?"),
        ),
    ),
}
"""The topics of drawn pages. No two entries of a page share a value by which a question names an entry."""


def make_workload(requests: int, pages: int, seed: int, settings: LookupSettings | None = None) -> list[LookupRequest]:
    """Shuffled questions about `pages` pages, whose topics take turns. A seed fixes them.

    Raises `ConfigError` if pages written by hand are asked for, and there are fewer of them, or of questions.
    """
    settings, rng = settings or LookupSettings(), random.Random(seed)
    if settings.written == BY_HAND:
        return _by_hand(rng, requests, pages)
    topics = cycle(TOPICS)
    questions = deal(rng, requests, pages, lambda rng: _draw_page(rng, next(topics), settings.entries), _ask)
    return [question for _, _, question in questions]


def _draw_page(rng: random.Random, name: str, count: int) -> tuple[Page, list[dict[str, str]]]:
    """A page of `count` entries of the topic `name`, and its entries."""
    topic = TOPICS[name]
    entries = topic.draw(rng, count)
    values = {kind: [entry[kind] for entry in entries] for kind in entries[0]}
    text = " ".join([topic.opening, *(topic.entry.format(**entry) for entry in entries)])
    return Page(topic=name, text=text, values=values), entries


def _ask(rng: random.Random, drawn_page: tuple[Page, list[dict[str, str]]], _: object) -> LookupRequest:
    """A question of the page's topic about one of its entries, both drawn at random."""
    page, entries = drawn_page
    kind, question = rng.choice(TOPICS[page.topic].questions)
    entry = rng.choice(entries)
    return _request(page, question.format(**entry), kind, entry[kind])


def _by_hand(rng: random.Random, requests: int, pages: int) -> list[LookupRequest]:
    """The first questions about each of the first `pages` pages written by hand, shuffled."""
    check_counts(requests, pages)
    by_page = read_pages()
    questions = [question for turn in zip_longest(*by_page[:pages]) for question in turn if question is not None]
    if pages > len(by_page) or requests > len(questions):
        raise ConfigError(
            f"{requests} questions about {pages} pages were not written by hand: there are {len(by_page)} pages, and "
            f"{len(questions)} questions about the first {min(pages, len(by_page))}; ask for fewer, or for generated "
            "ones"
        )
    questions = questions[:requests]
    rng.shuffle(questions)
    return questions


@cache
def read_pages() -> list[list[LookupRequest]]:
    """The questions about each page that was written by hand."""
    by_page = []
    for entry in tomllib.loads(FILE.read_text(encoding="utf-8"))["pages"]:
        page = Page(topic=entry["topic"], text=" ".join(entry["text"].split()), values=entry["values"])
        by_page.append([_request(page, question, kind, value) for question, kind, value in entry["questions"]])
    return by_page


def _request(page: Page, question: str, kind: str, value: str) -> LookupRequest:
    """A question for a value of a kind. The other values are those of this kind that the question does not name."""
    others = [other for other in dict.fromkeys(page.values[kind]) if other != value and not _names(question, other)]
    return LookupRequest(page=page, question=question, value=value, others=tuple(others))
