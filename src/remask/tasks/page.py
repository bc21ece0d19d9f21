"""The page that `smollm2` is shown with: the eight questions of `remask demo`, and what its card offers.

It is the first page that `town` draws from `SEED`, so nobody wrote it for the model. Of `CANDIDATES` questions about it
those were taken that are answered right without a cache and under `bicache`, whatever all-layer reuse makes of them
(`python -m remask_lab page` asks all of them anew).
"""

from typing import Final

from remask.tasks.town import TownRequest, TownSettings, make_workload

SEED: Final = 3
SHOPS: Final = 8
CANDIDATES: Final = 24
ASKED: Final = (0, 1, 2, 3, 4, 5, 6, 7)
"""Of the candidates: four look-ups, a record, and three counts."""
OFFERED: Final = (0, 1, 5)
"""Of these: those that a card shows, of two kinds."""
SAMPLING: Final = {"max_tokens": 32}
"""On top of the model's own: the longest answer, a record, has 30 tokens."""


def candidates() -> list[TownRequest]:
    """All questions that were tried."""
    return make_workload(CANDIDATES, 1, SEED, TownSettings(shops=SHOPS))


def asked() -> list[TownRequest]:
    """The questions that are asked, in their order."""
    drawn = candidates()
    return [drawn[number] for number in ASKED]
