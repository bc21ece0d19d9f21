"""The page of `smollm2`: the eight questions of `remask demo`, and those of the model's card.

It is the first page that `town` draws with `SEED`, so it was not written for the model. Of `CANDIDATES` questions the
demo asks the first of each kind that are answered right both without a cache and under `bicache`, whatever the answers
under all-layer reuse are. `python -m remask_lab page` asks all of them.
"""

from typing import Final

from remask.tasks.town import TownRequest, TownSettings, make_workload

SEED: Final = 3
SHOPS: Final = 8
CANDIDATES: Final = 24
DEMO_QUESTIONS: Final = (0, 2, 3, 4, 5, 1, 8, 12)
"""Indices of the demo's questions: four look-ups, two by shop and two by street, a record, and three counts."""
CARD_QUESTIONS: Final = (1, 3, 6)  # indices into `DEMO_QUESTIONS` of those of a card, each of another kind
SAMPLING: Final = {"max_tokens": 32}  # overrides the model's defaults; the longest answer, a record, has 30 tokens


def candidates() -> list[TownRequest]:
    """All questions from which those of the demo were chosen."""
    return make_workload(CANDIDATES, 1, SEED, TownSettings(shops=SHOPS))


def demo_questions() -> list[TownRequest]:
    """The questions of `remask demo`, in their order."""
    questions = candidates()
    return [questions[index] for index in DEMO_QUESTIONS]
