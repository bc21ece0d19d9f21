"""The exact pages of a running request: pages that it reads from the store, and pages that it publishes."""

from dataclasses import dataclass, field

import numpy as np

from remask.plan.canvas import Canvas
from remask.plan.plan import Plan
from remask.store.chain import Page, PageChain
from remask.store.pages import PageRange


@dataclass(slots=True)
class PageSharing:
    """Publishes the pages of one canvas as they become final.

    The K/V of a row are final once a pass computes the row after its whole block had settled. The pages `found` were
    read from the store; the pages `own` follow them.
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
    _key: int | None = field(init=False)  # hash of the last of them
    _last: Page | None = field(init=False)  # the stored page with that hash
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
        """Number of leading positions whose blocks have settled."""
        noisy = self.canvas.noisy
        return (int(noisy.argmax()) if noisy.any() else len(noisy)) // self.block * self.block

    def computed(self, plan: Plan, ready: int) -> None:
        """Publish the pages that `plan` has completed. `ready` leading positions had settled when it began to run."""
        rows = np.flatnonzero(plan.spans[0].rows[:ready])
        if len(rows) and rows[0] <= self.committed:
            self.committed = max(self.committed, int(rows[-1]) + 1)
        for number in range(self._offered, self.committed // self.chain.page_size):
            self._offer(number)

    def would_complete(self, stop: int) -> bool:
        """Whether committing the positions before `stop`, and no others, would complete a page."""
        return self._stored and stop // self.chain.page_size > self.committed // self.chain.page_size

    def release(self) -> None:
        """Publish nothing more. The pages themselves stay with their owners."""
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
