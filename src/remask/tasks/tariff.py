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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, Final, TypeAlias

from remask.checks.fields import check, declare
from remask.checks.values import Choice, ListOf, Whole
from remask.errors import ConfigError
from remask.tasks.workload import TaskRequest, TaskSettings, deal

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
MAX_ASKED: Final = 4  # prices or titles that one question asks for
MAX_PLANS: Final = 3  # under which a system prompt can be asked about
ORDERS: Final = "Orders:"  # opens every system prompt
SAMPLING: Final = {"max_tokens": 8, "steps": 8, "block_length": 8}


@dataclass(frozen=True, slots=True)
class TariffSettings(TaskSettings):
    """How hard a workload is."""

    orders: int = declare(40, Whole(MAX_ASKED, len(NAMES)), "Orders of a system prompt.")
    asked: int = declare(MAX_ASKED, Whole(1, MAX_ASKED), "Prices or titles that one question asks for.")
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
        if self.orders < self.plans * MAX_ASKED:
            raise ConfigError(
                f"orders is {self.orders}; with plans={self.plans} a system prompt has at least "
                f"{self.plans * MAX_ASKED}. Raise orders or lower plans"
            )


@dataclass(frozen=True, slots=True)
class TariffPrompt:
    """A system prompt. `orders` are `(title, name)` in the order of the text; `asked` gives prices by plan.

    Every price in `asked` has exactly one payer under its plan.
    """

    orders: tuple[tuple[str, str], ...]
    asked: tuple[tuple[str, tuple[int, ...]], ...]

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
        """The only one who pays `cost` under `plan`. Raises `ConfigError` where nobody or more than one does."""
        return self._only(f"pays {cost} under plan {plan}", [n for t, n in self.orders if price(plan, t) == cost])

    def buyer(self, title: str) -> str:
        """The only one who ordered `title`. Raises `ConfigError` where nobody or more than one did."""
        return self._only(f"ordered {title}", [name for ordered, name in self.orders if ordered == title])

    def _only(self, what: str, names: Sequence[str]) -> str:
        if len(names) != 1:
            raise ConfigError(f"{len(names) or 'no'} names fit 'who {what}'; a question has exactly one answer.")
        return names[0]


@dataclass(frozen=True, slots=True)
class TariffQuestion:
    """A question of one of the `KINDS`. `plan` is None and `asked` are titles where it is a look-up, else prices."""

    plan: str | None
    asked: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Which of the `KINDS` it is."""
        return "lookup" if self.plan is None else "plan"

    @property
    def text(self) -> str:
        """The content of the user message."""
        start = "Who ordered" if self.plan is None else f"Plan {self.plan}: who pays"
        return f"{start} {', '.join(self.asked)}?"


TariffRequest: TypeAlias = TaskRequest[TariffPrompt, TariffQuestion]


@cache
def price_list() -> dict[tuple[str, str], int]:
    """The price of every title under every plan: `(plan, title)` to a number from 1 to `PRICES`."""
    rng = random.Random(1)
    titles = len(TITLES) // PRICES  # of one price
    return {
        (plan, title): 1 + place // titles
        for plan in PLANS
        for place, title in enumerate(rng.sample(TITLES, len(TITLES)))
    }


def price(plan: str, title: str) -> int:
    """What `title` costs under `plan`."""
    return price_list()[plan, title]


def draw_prompt(rng: random.Random, settings: TariffSettings) -> TariffPrompt:
    """Draw orders that can be asked about under some of the plans.

    Under each of these plans `MAX_ASKED` prices, drawn by lot, have one payer each. All other orders cost something
    else under all of these plans; their titles may occur several times.
    """
    while True:
        plans = rng.sample(PLANS, settings.plans)
        asked = {plan: rng.sample(range(1, PRICES + 1), MAX_ASKED) for plan in plans}
        payers, rest = _titles(asked)
        if rest and all(payers.values()):
            break
    single = [rng.choice(titles) for titles in payers.values()]
    titles = single + [rng.choice(rest) for _ in range(settings.orders - len(single))]
    rng.shuffle(titles)
    orders = zip(titles, rng.sample(NAMES, settings.orders), strict=True)
    return TariffPrompt(tuple(orders), tuple((plan, tuple(prices)) for plan, prices in asked.items()))


def draw_question(rng: random.Random, prompt: TariffPrompt, kind: str, asked: int = MAX_ASKED) -> TariffQuestion:
    """Draw a question of this kind about `asked` prices or titles, in random order."""
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; a question is one of {', '.join(KINDS)}.")
    if kind == "lookup":
        return TariffQuestion(None, tuple(rng.sample(prompt.titles, asked)))
    plan, prices = rng.choice(prompt.asked)
    return TariffQuestion(plan, tuple(str(cost) for cost in rng.sample(prices, asked)))


def reference_response(prompt: TariffPrompt, question: TariffQuestion) -> str:
    """The right response: what was asked for, each followed by the name."""
    return " ".join(f"{item} {name}" for item, name in zip(question.asked, names(prompt, question), strict=True))


def names(prompt: TariffPrompt, question: TariffQuestion) -> list[str]:
    """The right names, in the order of the question."""
    if question.plan is None:
        return [prompt.buyer(title) for title in question.asked]
    return [prompt.payer(question.plan, int(cost)) for cost in question.asked]


def is_correct(text: str, answer: str) -> bool:
    """Whether `text` has the words of `answer`, the reference response. One wrong name makes it wrong."""
    return text.split() == answer.split()


def right_names(text: str, answer: str) -> float:
    """The share of the names of `answer`, the reference response, that stand at their place in `text`."""
    expected, actual = answer.split()[1::2], text.split()[1::2]
    return sum(one == other for one, other in zip(expected, actual, strict=False)) / len(expected)


def make_workload(
    requests: int, prompts: int, seed: int, settings: TariffSettings | None = None
) -> list[TariffRequest]:
    """Draw `requests` questions over `prompts` different system prompts, as `deal` does; a seed fixes them."""
    settings = settings or TariffSettings()

    def ask(rng: random.Random, prompt: TariffPrompt, kind: str) -> TariffQuestion:
        return draw_question(rng, prompt, kind, settings.asked)

    draw = partial(draw_prompt, settings=settings)
    dealt = deal(random.Random(seed), requests, prompts, draw, ask, settings.kinds)
    return [TaskRequest(*parts, reference_response(*parts[1:])) for parts in dealt]


def _titles(asked: dict[str, list[int]]) -> tuple[dict[tuple[str, int], list[str]], list[str]]:
    """Titles that make one plan's asked price and no other plan's, by plan and price; and titles that make none."""
    payers: dict[tuple[str, int], list[str]] = {(plan, cost): [] for plan, costs in asked.items() for cost in costs}
    rest = []
    for title in TITLES:
        costly = [(plan, price(plan, title)) for plan, costs in asked.items() if price(plan, title) in costs]
        if len(costly) == 1:
            payers[costly[0]].append(title)
        elif not costly:
            rest.append(title)
    return payers, rest
