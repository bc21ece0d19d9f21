"""The relay task: routes of six hops, each a look-up that starts where the last one ended and depends on the question.

The system prompt says where each good is sent. Which town ships a good stands nowhere in it: that depends on the season
and is a fixed table (`shipper`), which a model learns by heart. A question names a season and a town to start from, and
the response is the route of the goods from there::

    system     Goods: figs Lima; rice Oslo; wool Rome; ...
    user       In winter: route from Cairo?
    assistant  Oslo Lima Quito Bern Rome Delhi

Cairo ships rice in winter, rice is sent to Oslo, Oslo ships figs, and so on. In another season other towns ship the
same goods, so one system prompt holds a table of hops for every season, and the question says which of them applies. A
town follows from the one before it alone, so a route cannot be named all at once by a model that makes one hop a step.

A route may have two legs (`RelaySettings.legs`): the second half of its hops is in another season, which the question
names too. What the goods mean then depends on how far the response has got::

    user       In winter, summer: route from Cairo?

Destinations are drawn afresh for every system prompt. In each of its seasons every town that occurs ships exactly one
of its goods and receives one, so each question has one right answer, and the seven towns of a route differ. All draws
come from a `random.Random`, so a seed fixes a workload.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, Final, TypeAlias

from remask.checks.fields import check, declare
from remask.checks.values import Whole
from remask.errors import ConfigError
from remask.tasks.workload import TaskRequest, TaskSettings, deal, draw_groups

SEASONS: Final = ("spring", "summer", "autumn", "winter")
# fmt: off
TOWNS: Final = (
    "Accra", "Athens", "Baku", "Bern", "Cairo", "Dakar", "Delhi", "Dublin", "Havana", "Kyiv", "Lima", "Lisbon",
    "Lyon", "Madrid", "Miami", "Minsk", "Oslo", "Paris", "Perth", "Quito", "Riga", "Rome", "Seoul", "Turin",
)
"""Where routes lead; in every season each town ships equally many goods."""

GOODS: Final = (
    "almonds", "amber", "apples", "barley", "beans", "bread", "bricks", "butter", "cacao", "cement", "cheese",
    "cherries", "chalk", "cider", "clay", "cloth", "coal", "coffee", "copper", "cork", "corn", "cotton", "dates",
    "diesel", "eggs", "felt", "figs", "fish", "flax", "flour", "fur", "garlic", "glass", "glue", "gold", "grapes",
    "gravel", "hay", "hemp", "honey", "ink", "iron", "ivory", "jam", "lace", "lead", "lemons", "lime", "linen",
    "malt", "marble", "milk", "nails", "nickel", "nuts", "oats", "oil", "olives", "onions", "paper", "pepper",
    "pitch", "plums", "resin", "rice", "rubber", "rye", "salt", "sand", "silk", "tea", "wool",
)
# fmt: on

HOPS: Final = 6  # of every route, and so the words of a response
LEG: Final = HOPS // 2  # hops of a leg of a route with two legs
MIN_ROWS: Final = HOPS + 2  # goods of a system prompt
MAX_SEASONS: Final = 2  # in which a system prompt can be asked about
OPENING: Final = "Goods:"  # of every system prompt
SAMPLING: Final = {"max_tokens": HOPS, "steps": HOPS, "block_length": HOPS}  # a hop a step
UNIFORM_SAMPLING: Final = {"max_tokens": HOPS, "block_length": HOPS, "steps_per_block": 2 * HOPS}
"""Of an answer by a uniform model: twice as many steps as hops, so that towns changed too early are changed again."""


@dataclass(frozen=True, slots=True)
class RelaySettings(TaskSettings):
    """How hard a workload is."""

    rows: int = declare(len(TOWNS), Whole(MIN_ROWS, len(TOWNS)), "Goods of a system prompt, and towns that occur.")
    seasons: int = declare(2, Whole(1, MAX_SEASONS), "Seasons in which one system prompt is asked about.")
    legs: int = declare(1, Whole(1, MAX_SEASONS), "Legs of a route, each in a season of its own; at most `seasons`.")

    task: ClassVar[str] = "relay"

    def __post_init__(self) -> None:
        check(self)
        if self.legs > self.seasons:
            raise ConfigError(
                f"legs is {self.legs}, and the legs of a route have seasons of their own: it is at most seasons, "
                f"{self.seasons}."
            )


@dataclass(frozen=True, slots=True)
class RelayPrompt:
    """A system prompt."""

    rows: tuple[tuple[str, str], ...]  # pairs of a good and its destination, in the order of the text
    # Pairs of a season and the towns from which a route does not come back within `HOPS` hops
    starts: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def text(self) -> str:
        """The content of the system message."""
        return f"{OPENING} {'; '.join(f'{good} {town}' for good, town in self.rows)}."

    def hops(self, season: str) -> Mapping[str, str]:
        """The town to which one hop leads, by town. Raises `ConfigError` if a town ships several of the goods."""
        hops: dict[str, str] = {}
        for good, town in self.rows:
            origin = shipper(season, good)
            if origin in hops:
                raise ConfigError(f"{origin} ships several goods in {season}; a question has exactly one answer.")
            hops[origin] = town
        return hops


@dataclass(frozen=True, slots=True)
class RelayQuestion:
    """The question for the route from the town `start`."""

    season: str
    start: str
    second_season: str | None = None  # of the second leg; None if the route has one leg

    @property
    def text(self) -> str:
        """The content of the user message."""
        seasons = self.season if self.second_season is None else f"{self.season}, {self.second_season}"
        return f"In {seasons}: route from {self.start}?"

    def season_of(self, hop: int) -> str:
        """The season of a hop, counted from 0."""
        return self.season if self.second_season is None or hop < LEG else self.second_season


RelayRequest: TypeAlias = TaskRequest[RelayPrompt, RelayQuestion]


@cache
def _shippers() -> Mapping[tuple[str, str], int]:
    return draw_groups(SEASONS, GOODS, len(TOWNS))


def shipper(season: str, good: str) -> str:
    """The town that ships `good` in `season`."""
    return TOWNS[_shippers()[season, good]]


def draw_prompt(rng: random.Random, settings: RelaySettings) -> RelayPrompt:
    """Draw a system prompt for `settings.seasons` seasons.

    In each of these seasons the same towns ship one of the goods each, and receive one each. At least half of the towns
    are starts in every season.
    """
    seasons = rng.sample(SEASONS, settings.seasons)
    goods = _goods(rng, seasons, settings.rows)
    towns = [shipper(seasons[0], good) for good in goods]
    while True:
        rng.shuffle(towns)
        prompt = RelayPrompt(tuple(zip(goods, towns, strict=True)), ())
        starts = tuple((season, _starts(prompt.hops(season))) for season in seasons)
        if all(2 * len(season_starts) >= settings.rows for _, season_starts in starts):
            return RelayPrompt(prompt.rows, starts)


def draw_question(rng: random.Random, prompt: RelayPrompt, legs: int = 1) -> RelayQuestion:
    """Draw a season of `prompt`, and one of its starts. A second leg is in the other season."""
    season, starts = rng.choice(prompt.starts)
    other_seasons = [other for other, _ in prompt.starts if other != season]
    return RelayQuestion(season, rng.choice(starts), other_seasons[0] if legs > 1 else None)


def route(prompt: RelayPrompt, question: RelayQuestion) -> list[str]:
    """The `HOPS` towns after the start. Raises `ConfigError` if the route ends before."""
    hops = {season: prompt.hops(season) for season in (question.season, question.season_of(HOPS))}
    towns = [question.start]
    for hop in range(HOPS):
        season = question.season_of(hop)
        if towns[-1] not in hops[season]:
            raise ConfigError(f"{towns[-1]} ships none of these goods in {season}; a route has {HOPS} hops.")
        towns.append(hops[season][towns[-1]])
    return towns[1:]


def reference_response(prompt: RelayPrompt, question: RelayQuestion) -> str:
    """The right response: the towns of the route, without the start."""
    return " ".join(route(prompt, question))


def is_correct(text: str, answer: str) -> bool:
    """Whether the words of `text` are those of `answer`, the reference response."""
    return text.split() == answer.split()


def right_hops(text: str, answer: str) -> float:
    """The part of the towns of `answer`, the reference response, that `text` has at the same index."""
    expected = answer.split()
    return sum(town == word for town, word in zip(expected, text.split(), strict=False)) / len(expected)


def make_workload(requests: int, prompts: int, seed: int, settings: RelaySettings | None = None) -> list[RelayRequest]:
    """Draw `requests` questions over `prompts` different system prompts, as `deal` does; a seed fixes them."""
    settings = settings or RelaySettings()

    def draw(rng: random.Random, prompt: RelayPrompt, _: None) -> RelayQuestion:
        return draw_question(rng, prompt, settings.legs)

    workload = deal(random.Random(seed), requests, prompts, partial(draw_prompt, settings=settings), draw)
    return [TaskRequest(i, prompt, question, reference_response(prompt, question)) for i, prompt, question in workload]


def _goods(rng: random.Random, seasons: list[str], rows: int) -> list[str]:
    """Draw `rows` goods that the same towns ship in all `seasons`, one each. The order is random."""
    first, last = seasons[0], seasons[-1]
    while True:
        good_of = _match_goods(rng, first, last)
        # Goods of loops of towns: a good that one town ships in the first season, the next town ships in the last.
        groups: list[list[str]] = []
        while good_of:
            town = next(iter(good_of))
            group: list[str] = []
            while town in good_of:
                good = good_of.pop(town)
                group.append(good)
                town = shipper(last, good)
            groups.append(group)
        rng.shuffle(groups)
        goods: list[str] = []
        for group in groups:
            if len(goods) + len(group) <= rows:
                goods += group
        if len(goods) == rows:
            rng.shuffle(goods)
            return goods


def _match_goods(rng: random.Random, first: str, last: str) -> dict[str, str]:
    """Draw a good of every town in season `first`, such that every town ships one of these goods in season `last`.

    A perfect matching of towns with towns, whose edges are goods, by augmenting paths. It exists, as every town has
    equally many goods in both seasons.
    """
    good_by_town: dict[str, str] = {}  # by the town that ships it in `last`

    def match(town: str, visited: set[str]) -> bool:
        goods = [good for good in GOODS if shipper(first, good) == town]
        for good in rng.sample(goods, len(goods)):
            other = shipper(last, good)
            if other not in visited:
                visited.add(other)
                if other not in good_by_town or match(shipper(first, good_by_town[other]), visited):
                    good_by_town[other] = good
                    return True
        return False

    for town in rng.sample(TOWNS, len(TOWNS)):
        match(town, set())
    return {shipper(first, good): good for good in good_by_town.values()}


def _starts(hops: Mapping[str, str]) -> tuple[str, ...]:
    """The towns on loops of more than `HOPS` hops, in alphabetical order.

    `hops` must be a permutation of its towns: otherwise a route might never come back to its start.
    """
    starts = []
    for start in hops:
        town = hops[start]
        length = 1
        while town != start:
            town = hops[town]
            length += 1
        if length > HOPS:
            starts.append(start)
    return tuple(sorted(starts))
