"""The town task: plain English questions that only the page in the system prompt can answer.

The page says of each shop of a town in which street it is, when it opens and closes, and on which day it stays shut, a
sentence or two each, in random order::

    system     Answer from this page. The bakery is in Mill Street. It opens at 8 and closes at 17, and it is shut on
               Monday. ...
    user       When does the bakery open?
    assistant  The bakery opens at 8.

Questions are of four kinds. `find` asks for one fact about a shop by its name. `street` asks for one about the shop in
a street, which is named nowhere but on the page, so that it has to be found first. `record` asks for all facts about a
shop, as JSON. `count` asks for the shops that are shut on a day, in the order of the page.

Pages are drawn afresh, so nothing can be learned by heart. Many questions are about one page, which makes the task a
workload for caching a prefix across requests. All draws come from a `random.Random`, so a seed fixes a workload.
"""

import json
import random
import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from remask.checks.fields import declare
from remask.checks.values import Whole
from remask.tasks.workload import Message, TaskSettings, deal

# fmt: off
SHOPS: Final = (
    "bakery", "bank", "barber", "bike shop", "bookshop", "butcher", "cafe", "camera shop", "carpet shop",
    "cheese shop", "clinic", "clothes shop", "dairy", "dentist", "farm shop", "fish shop", "florist", "fruit shop",
    "garage", "gift shop", "glass shop", "grocery", "gym", "hat shop", "hotel desk", "ice cream shop", "jeweller",
    "key shop", "lamp shop", "laundry", "library", "map shop", "market hall", "museum", "music shop", "optician",
    "paint shop", "paper shop", "pet shop", "pharmacy", "pizza place", "post office", "print shop", "record shop",
    "school shop", "shoe shop", "soap shop", "sweet shop", "tailor", "tea room", "ticket office", "tool shop",
    "toy shop", "watch shop", "wine shop", "wool shop",
)
STREETS: Final = tuple(f"{name} Street" for name in (
    "Abbey", "Apple", "Baker", "Bell", "Bridge", "Canal", "Castle", "Chapel", "Cherry", "Church", "Corn", "Cross",
    "Duke", "East", "Elm", "Ferry", "Field", "Forest", "Garden", "Gate", "Grove", "Harbour", "High", "Hill", "Iron",
    "King", "Lake", "Lime", "Long", "Maple", "Market", "Mill", "Moor", "New", "North", "Oak", "Orchard", "Park",
    "Pine", "Queen", "River", "Rose", "Salt", "School", "Silver", "South", "Spring", "Station", "Temple", "Tower",
    "Victoria", "Wall", "Water", "West", "Willow", "Windmill",
))
# fmt: on
"""No two shops of a page share a street, so a street tells its shop."""
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OPENS: Final = 6, 11  # the first and the last hour at which a shop opens
CLOSES: Final = 14, 22  # the first and the last hour at which a shop closes
KINDS: Final = ("find", "street", "record", "count")
RULES: Final = "Answer from this page."
DEFAULT_SHOPS: Final = 16  # of a page, which then has some 450 tokens
SAMPLING: Final = {"max_tokens": 32, "block_length": 16}  # the longest answer, a record, has 30 tokens


@dataclass(frozen=True, slots=True)
class TownSettings(TaskSettings):
    """How long a page is."""

    shops: int = declare(DEFAULT_SHOPS, Whole(4, len(SHOPS)), "Shops on a page.")

    task: ClassVar[str] = "town"


@dataclass(frozen=True, slots=True)
class Shop:
    """The facts about a shop. Hours are whole numbers, of 24."""

    name: str
    street: str
    opens: int
    closes: int
    shut: str

    @property
    def text(self) -> str:
        """The shop's two sentences on the page."""
        hours = f"It opens at {self.opens} and closes at {self.closes}, and it is shut on {self.shut}."
        return f"The {self.name} is in {self.street}. {hours}"

    @property
    def record(self) -> str:
        """The facts as JSON, without the name."""
        return json.dumps({"street": self.street, "opens": self.opens, "closes": self.closes, "shut": self.shut})


@dataclass(frozen=True, slots=True)
class TownRequest:
    """One question about a page, with its right answer."""

    page: int  # index of the page in the workload
    system: str  # the page
    kind: str  # one of `KINDS`
    question: str  # the user's turn
    answer: str  # the right response
    fact: str  # the part of the response that must be right, such as a street, an hour or a day

    @property
    def messages(self) -> list[Message]:
        """The chat messages to send; the page is shared by all requests about it."""
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.question}]


def draw_page(rng: random.Random, shops: int = DEFAULT_SHOPS) -> list[Shop]:
    """The shops of a town, in the order of its page."""
    streets = rng.sample(STREETS, shops)
    return [
        Shop(name=name, street=street, opens=rng.randint(*OPENS), closes=rng.randint(*CLOSES), shut=rng.choice(DAYS))
        for name, street in zip(rng.sample(SHOPS, shops), streets, strict=True)
    ]


def page_text(shops: list[Shop]) -> str:
    """The system prompt: the rules and the page."""
    return " ".join([RULES, *(shop.text for shop in shops)])


def draw_question(rng: random.Random, shops: list[Shop], kind: str) -> tuple[str, str, str]:
    """A question of this kind, its answer, and the part of the answer that must be right."""
    shop = rng.choice(shops)
    if kind == "record":
        return f"What does the page say of the {shop.name}? Give JSON.", shop.record, shop.record
    if kind == "count":
        day = rng.choice(sorted({shop.shut for shop in shops}))
        names = ", ".join(f"the {shop.name}" for shop in shops if shop.shut == day)
        return f"What is shut on {day}?", f"Shut on {day}: {names}.", names
    name = f"the {shop.name}" if kind == "find" else f"the shop in {shop.street}"
    subject = name[0].upper() + name[1:]
    choices = [
        (f"When does {name} open?", f"{subject} opens at {shop.opens}.", str(shop.opens)),
        (f"When does {name} close?", f"{subject} closes at {shop.closes}.", str(shop.closes)),
        (f"On which day is {name} shut?", f"{subject} is shut on {shop.shut}.", shop.shut),
    ]
    if kind == "find":
        choices.append((f"In which street is {name}?", f"{subject} is in {shop.street}.", shop.street))
    else:
        choices.append((f"What is in {shop.street}?", f"The {shop.name} is in {shop.street}.", shop.name))
    return rng.choice(choices)


def make_workload(requests: int, pages: int, seed: int, settings: TownSettings | None = None) -> list[TownRequest]:
    """Draw `requests` questions over `pages` pages, as `deal` does; a seed fixes them."""
    settings = settings or TownSettings()
    draw = partial(draw_page, shops=settings.shops)
    workload = deal(random.Random(seed), requests, pages, draw, _draw_with_kind, KINDS)
    return [
        TownRequest(page=page, system=page_text(shops), kind=kind, question=question, answer=answer, fact=fact)
        for page, shops, (kind, question, answer, fact) in workload
    ]


def _draw_with_kind(rng: random.Random, shops: list[Shop], kind: str) -> tuple[str, str, str, str]:
    return kind, *draw_question(rng, shops, kind)


def is_correct(request: TownRequest, text: str) -> bool:
    """Whether a response has the right fact at its end or as its subject, all shops in order, or the whole record."""
    if request.kind == "record":
        try:
            return bool(json.loads(text) == json.loads(request.answer))
        except (ValueError, RecursionError):
            return False
    if request.kind == "count":
        return text.strip().rstrip(".").rpartition(": ")[2] == request.fact
    fact = re.escape(request.fact)
    return re.search(rf"(?<!\w){fact}[.]?\s*$|^The {fact} is in ", text) is not None
