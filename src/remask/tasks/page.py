"""The page that `smollm2` is shown with: the eight questions of `remask demo`, and what its card offers.

It is the first page that `town` draws from `SEED`, so nobody wrote it for the model. Of `CANDIDATES` questions about it
the first ones of each kind are taken that are answered right both without a cache and under `bicache`, whatever
all-layer reuse makes of them. `python -m remask_lab page` asks all of them.
"""

from typing import Final

from remask.tasks.town import TownRequest, TownSettings, make_workload

SEED: Final = 3
SHOPS: Final = 8
CANDIDATES: Final = 24
ASKED: Final = (0, 2, 3, 4, 5, 1, 8, 12)
"""Of the candidates: four look-ups, two of a shop and two of a street, a record, and three counts."""
OFFERED: Final = (1, 3, 6)  # of these: those that a card shows, each of another kind
SAMPLING: Final = {"max_tokens": 32}  # on top of the model's own: the longest answer, a record, has 30 tokens


def candidates() -> list[TownRequest]:
    """All questions that were tried."""
    return make_workload(CANDIDATES, 1, SEED, TownSettings(shops=SHOPS))


def asked() -> list[TownRequest]:
    """The questions that are asked, in their order."""
    drawn = candidates()
    return [drawn[number] for number in ASKED]
