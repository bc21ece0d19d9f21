"""A running request's share in the exact pages of the store: what it finds there, and what it offers."""

from dataclasses import dataclass, field

import numpy as np

from remask.core.canvas import Canvas
from remask.core.plan import Plan
from remask.store.chain import Page, PageChain
from remask.store.pages import PageRange


@dataclass(slots=True)
class PageSharing:
    """Publishes the pages of one canvas as they become final.

    A row's K/V are final once a pass has computed it that began when its whole block had settled. The pages `found`
    were read from the store, `own` stand after them.
    """

    chain: PageChain
    canvas: Canvas
    block: int
    salt: str
    found: list[Page]
    own: list[PageRange]  # one a page
    keys: list[int]  # identities of the pages that the prompt fills
    committed: int = field(init=False)  # leading positions whose K/V are final
    _offered: int = field(init=False)  # pages
    _key: int | None = field(init=False)  # identity of the last of them
    _last: Page | None = field(init=False)  # and where it is stored, while the chain up to there is
    _stored: bool = True  # whether the chain is unbroken up to the next page
    _expected: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.committed = len(self.found) * self.chain.page_size
        self._offered = len(self.found)
        self._last = self.found[-1] if self.found else None
        self._key = None if self._last is None else self._last.key
        self._expected = self.keys[self._offered :]
        self.chain.expect(self._expected)  # others may wait for them

    def ready(self) -> int:
        """Leading positions whose blocks have settled, as the canvas is now."""
        noisy = self.canvas.noisy
        return (int(noisy.argmax()) if noisy.any() else len(noisy)) // self.block * self.block

    def computed(self, plan: Plan, ready: int) -> None:
        """`plan` has run, which began when `ready` leading positions had settled. Publishes what is complete by it."""
        rows = np.flatnonzero(plan.spans[0].rows[:ready])
        if len(rows) and rows[0] <= self.committed:
            self.committed = max(self.committed, int(rows[-1]) + 1)
        for number in range(self._offered, self.committed // self.chain.page_size):
            self._offer(number)

    def would_complete(self, stop: int) -> bool:
        """Whether committing the positions before `stop`, and no others, would complete a page."""
        return self._stored and stop // self.chain.page_size > self.committed // self.chain.page_size

    def release(self) -> None:
        """Nothing more will be offered. The pages themselves are given back by whoever owns them."""
        self.chain.give_up(self._expected)
        self._expected = []

    def _offer(self, number: int) -> None:
        size = self.chain.page_size
        tokens = self.canvas.tokens[number * size : (number + 1) * size].tolist()
        key = self.chain.identity(tokens, self._key, self.salt)
        if self._stored:
            self._last = self.chain.publish(tokens, key, self._last, self.own[number - len(self.found)], self.salt)
            self._stored = self._last is not None
        self._key, self._offered = key, number + 1
        if key in self._expected:
            self._expected.remove(key)
            self.chain.give_up([key])
