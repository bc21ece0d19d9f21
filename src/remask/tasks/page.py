"""The page that `smollm2` is shown with: the eight questions of `remask demo`, and what its card offers.

It is the first page that `town` draws with `SEED`, so it was not written for the model. The questions are the first of
`CANDIDATES` of each kind that are answered right both without a cache and under `bicache`, whatever all-layer reuse
makes of them. `python -m remask_lab page` asks all of them.
"""

from typing import Final

from remask.tasks.town import TownRequest, TownSettings, make_workload

SEED: Final = 3
SHOPS: Final = 8
CANDIDATES: Final = 24
CHOSEN: Final = (0, 2, 3, 4, 5, 1, 8, 12)
"""The candidates that the demo asks: four look-ups, two of a shop and two of a street, a record, and three counts."""
CARD_QUESTIONS: Final = (1, 3, 6)  # indices into `CHOSEN` of the questions that a card shows, each of another kind
SAMPLING: Final = {"max_tokens": 32}  # overrides the model's defaults; the longest answer, a record, has 30 tokens


def candidates() -> list[TownRequest]:
    """Return all questions among which those of the demo were chosen."""
    return make_workload(CANDIDATES, 1, SEED, TownSettings(shops=SHOPS))


def demo_questions() -> list[TownRequest]:
    """Return the questions of `remask demo`, in their order."""
    questions = candidates()
    return [questions[number] for number in CHOSEN]
