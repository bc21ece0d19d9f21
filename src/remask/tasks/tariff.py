"""The tariff task: questions whose answers depend on a price list in the weights and on orders in the system prompt.

The system prompt says who ordered what. What a title costs under each plan stands nowhere in it: `price` is a fixed
table, which a model learns by heart. A question names a plan and asks who pays given prices::

    system     Orders: rope Anna; soap Ben; ...
    user       Plan gold: who pays 5, 2, 7, 1?
    assistant  5 Anna 2 Ben 7 Carl 1 Dora

Six titles cost the same under a plan, so that no single title stands for a price. Who pays what is settled by the
question and the order together: the orders' rows have to be computed in the light of the question, which a prefix that
was computed alone cannot know. A second kind of question needs no plan::

    user       Who ordered rope, soap, lamp, tent?
    assistant  rope Anna soap Ben lamp Carl tent Dora

Orders are drawn afresh for every system prompt. Under each of its plans every price that a question asks for has
exactly one payer, and every title that a question asks for was ordered once, so each question has one right answer. All
draws come from a `random.Random`, so a seed fixes a workload.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, Final, TypeAlias

from remask.checks.fields import check, declare
from remask.checks.values import Choice, ListOf, Whole
from remask.errors import ConfigError
from remask.tasks.workload import TaskRequest, TaskSettings, deal, draw_groups

PLANS: Final = ("basic", "silver", "gold", "family", "student", "night")
PRICES: Final = 8  # prices go from 1 to this number, and under every plan equally many titles have each

# fmt: off
TITLES: Final = (
    "apron", "basket", "blanket", "bottle", "brush", "bucket", "candle", "carpet", "chair", "clock", "coat", "compass",
    "cup", "curtain", "desk", "drum", "fan", "flute", "fork", "glove", "guitar", "hammer", "hat", "kettle", "kite",
    "ladder", "lamp", "lantern", "mat", "mirror", "needle", "paddle", "pan", "piano", "pillow", "plate", "radio",
    "rope", "saw", "scarf", "shelf", "shovel", "soap", "spoon", "stool", "table", "tent", "towel",
)
NAMES: Final = (
    "Ada", "Adam", "Alex", "Alice", "Amir", "Anna", "Ben", "Bob", "Carl", "Chen", "Clara", "Dan", "Dora", "Emil",
    "Emma", "Eric", "Eva", "Felix", "Finn", "Frida", "Greta", "Hans", "Hugo", "Ida", "Ines", "Iris", "Ivan", "Jack",
    "Jane", "John", "Julia", "Karl", "Kim", "Lara", "Lena", "Leo", "Lily", "Lou", "Lucy", "Luis", "Maja", "Marc",
    "Mary", "Max", "Mia", "Mila", "Nina", "Noah", "Nora", "Olga", "Oscar", "Otto", "Paul", "Peter", "Rita", "Robin",
    "Rosa", "Ruth", "Sam", "Sara", "Tim", "Tom", "Vera", "Zoe",
)
# fmt: on

KINDS: Final = ("plan", "lookup")
MAX_ITEMS: Final = 4  # prices or titles that one question asks for
MAX_PLANS: Final = 3  # under which a system prompt can be asked about
ORDERS: Final = "Orders:"  # opens every system prompt
SAMPLING: Final = {"max_tokens": 8, "steps": 8, "block_length": 8}


@dataclass(frozen=True, slots=True)
class TariffSettings(TaskSettings):
    """How hard a workload is."""

    orders: int = declare(40, Whole(MAX_ITEMS, len(NAMES)), "Orders of a system prompt.")
    asked: int = declare(MAX_ITEMS, Whole(1, MAX_ITEMS), "Prices or titles that one question asks for.")
    kinds: tuple[str, ...] = declare(
        ("plan",), ListOf(Choice(KINDS), "kinds", len(KINDS)), "Kinds of questions, dealt out evenly."
    )
    plans: int = declare(2, Whole(1, MAX_PLANS), "Plans under which one system prompt is asked about.")

    task: ClassVar[str] = "tariff"

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "kinds", tuple(dict.fromkeys(self.kinds)))
        if not self.kinds:
            raise ConfigError(f"kinds names no kind of question; it names one or more of {', '.join(KINDS)}")
        if self.orders < self.plans * MAX_ITEMS:
            raise ConfigError(
                f"orders is {self.orders}; with plans={self.plans} a system prompt has at least "
                f"{self.plans * MAX_ITEMS}. Raise orders or lower plans"
            )


@dataclass(frozen=True, slots=True)
class TariffPrompt:
    """A system prompt."""

    orders: tuple[tuple[str, str], ...]  # pairs of a title and a name, in the order of the text
    prices: tuple[tuple[str, tuple[int, ...]], ...]  # pairs of a plan and the prices that have one payer under it

    @property
    def text(self) -> str:
        """The content of the system message."""
        return f"{ORDERS} {'; '.join(f'{title} {name}' for title, name in self.orders)}."

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles that were ordered once."""
        counts = Counter(title for title, _ in self.orders)
        return tuple(title for title, count in counts.items() if count == 1)

    def payer(self, plan: str, cost: int) -> str:
        """The only name that pays `cost` under `plan`. Raises `ConfigError` if none or several do."""
        names = [name for title, name in self.orders if price(plan, title) == cost]
        return _single_name(f"pays {cost} under plan {plan}", names)

    def buyer(self, title: str) -> str:
        """The only name that ordered `title`. Raises `ConfigError` if none or several did."""
        return _single_name(f"ordered {title}", [name for other, name in self.orders if other == title])


def _single_name(predicate: str, names: Sequence[str]) -> str:
    """The only one of `names`. Raises `ConfigError` if there is none or several; `predicate` says who was asked for."""
    if len(names) != 1:
        raise ConfigError(f"{len(names) or 'no'} names fit 'who {predicate}'; a question has exactly one answer.")
    return names[0]


@dataclass(frozen=True, slots=True)
class TariffQuestion:
    """A question of one of the `KINDS`."""

    plan: str | None  # None for a look-up
    items: tuple[str, ...]  # titles of a look-up, else prices

    @property
    def kind(self) -> str:
        """Which of the `KINDS` it is."""
        return "lookup" if self.plan is None else "plan"

    @property
    def text(self) -> str:
        """The content of the user message."""
        start = "Who ordered" if self.plan is None else f"Plan {self.plan}: who pays"
        return f"{start} {', '.join(self.items)}?"


TariffRequest: TypeAlias = TaskRequest[TariffPrompt, TariffQuestion]


@cache
def _price_groups() -> Mapping[tuple[str, str], int]:
    return draw_groups(PLANS, TITLES, PRICES)


def price(plan: str, title: str) -> int:
    """The price of `title` under `plan`, from 1 to `PRICES`."""
    return 1 + _price_groups()[plan, title]


def draw_prompt(rng: random.Random, settings: TariffSettings) -> TariffPrompt:
    """Draw a system prompt for `settings.plans` plans.

    Under each of these plans `MAX_ITEMS` prices, drawn by lot, have one payer each. All other orders have other prices
    under all of these plans; their titles may occur several times.
    """
    while True:
        plans = rng.sample(PLANS, settings.plans)
        prices = {plan: rng.sample(range(1, PRICES + 1), MAX_ITEMS) for plan in plans}
        titles_by_price, other_titles = _split_titles(prices)
        if other_titles and all(titles_by_price.values()):
            break
    single_titles = [rng.choice(titles) for titles in titles_by_price.values()]
    titles = single_titles + [rng.choice(other_titles) for _ in range(settings.orders - len(single_titles))]
    rng.shuffle(titles)
    orders = zip(titles, rng.sample(NAMES, settings.orders), strict=True)
    return TariffPrompt(tuple(orders), tuple((plan, tuple(plan_prices)) for plan, plan_prices in prices.items()))


def draw_question(rng: random.Random, prompt: TariffPrompt, kind: str, count: int = MAX_ITEMS) -> TariffQuestion:
    """Draw a question of this `kind` about `count` prices or titles, in random order. Raises `ConfigError`."""
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; a question is one of {', '.join(KINDS)}.")
    plan, items = (None, prompt.titles) if kind == "lookup" else rng.choice(prompt.prices)
    if not 1 <= count <= len(items):
        raise ConfigError(f"count is {count}; this question asks for 1 to {len(items)} prices or titles.")
    return TariffQuestion(plan, tuple(map(str, rng.sample(items, count))))


def reference_response(prompt: TariffPrompt, question: TariffQuestion) -> str:
    """The right response: each item of the question, followed by the name."""
    names = expected_names(prompt, question)
    return " ".join(f"{item} {name}" for item, name in zip(question.items, names, strict=True))


def expected_names(prompt: TariffPrompt, question: TariffQuestion) -> list[str]:
    """The right names, in the order of the question's items."""
    if question.plan is None:
        return [prompt.buyer(title) for title in question.items]
    return [prompt.payer(question.plan, int(cost)) for cost in question.items]


def is_correct(text: str, answer: str) -> bool:
    """Whether the words of `text` are those of `answer`, the reference response."""
    return text.split() == answer.split()


def right_names(text: str, answer: str) -> float:
    """The part of the names of `answer`, the reference response, that `text` has at the same index."""
    expected = answer.split()[1::2]
    return sum(name == word for name, word in zip(expected, text.split()[1::2], strict=False)) / len(expected)


def make_workload(
    requests: int, prompts: int, seed: int, settings: TariffSettings | None = None
) -> list[TariffRequest]:
    """Draw `requests` questions over `prompts` different system prompts, as `deal` does; a seed fixes them."""
    settings = settings or TariffSettings()

    def draw(rng: random.Random, prompt: TariffPrompt, kind: str) -> TariffQuestion:
        return draw_question(rng, prompt, kind, settings.asked)

    draw_system = partial(draw_prompt, settings=settings)
    workload = deal(random.Random(seed), requests, prompts, draw_system, draw, settings.kinds)
    return [TaskRequest(i, prompt, question, reference_response(prompt, question)) for i, prompt, question in workload]


def _split_titles(prices: dict[str, list[int]]) -> tuple[dict[tuple[str, int], list[str]], list[str]]:
    """Split the titles by the `prices` of each plan.

    Returns by plan and price the titles that have this price, and under the other plans none of theirs; and the titles
    that have none of the prices under any plan.
    """
    titles: dict[tuple[str, int], list[str]] = {(plan, cost): [] for plan, costs in prices.items() for cost in costs}
    other_titles = []
    for title in TITLES:
        matches = [(plan, price(plan, title)) for plan, costs in prices.items() if price(plan, title) in costs]
        if len(matches) == 1:
            titles[matches[0]].append(title)
        elif not matches:
            other_titles.append(title)
    return titles, other_titles
