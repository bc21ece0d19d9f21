"""Small page pools for the playground, with the engine's page accounting, made-up tokens and no tensors.

Their sessions are limited in number and age, each known only to the client that opened it.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from remask.engine.placement import PageSharing
from remask.plan.canvas import Canvas
from remask.plan.plan import Plan
from remask.plan.spans import Mask, Span
from remask.server.answers.base import Answer
from remask.server.errors import ApiError
from remask.store.chain import PageChain
from remask.store.pages import Extent, PageAllocator

PAGES = 24
PAGE_SIZE = 4
BLOCK = 4
SHARED = 14  # tokens of the shared prefix: three full pages, which are shared, and two tokens of a fourth page
RESPONSE = 8
MASK_ID = 0
LAYER = range(1)
NUMBER_STRIDE = 1000  # between the token ids of two requests, so that no two requests have tokens in common

MAX_SESSIONS = 256
IDLE_S = 1800.0


class SandboxPage(Answer):
    """A page and the requests that read it."""

    page: int
    references: int
    requests: list[int]
    stored: bool
    slots_filled: int


class SandboxRequest(Answer):
    """A request and its pages."""

    request: int
    shared_prefix: bool
    page_table: list[int]
    pages_found: int
    tokens: int
    prompt_tokens: int
    settled_tokens: int
    response_tokens: int


class SandboxTotals(Answer):
    """Sums over all pages."""

    pages: int
    pages_in_use: int
    pages_cached: int
    pages_shared: int
    pages_saved: int
    slots_in_use: int
    slots_wasted: int
    utilisation: float | None
    tokens_queried: int
    tokens_hit: int
    evictions: int


class SandboxState(Answer):
    """A session: its pages, its requests and their totals."""

    session: str
    page_size: int
    caching: bool
    pages: list[SandboxPage]
    requests: list[SandboxRequest]
    totals: SandboxTotals


class PoolFullError(ApiError):
    """The pool has too few free pages, and evicting stored ones does not free enough."""

    def __init__(self, message: str) -> None:
        super().__init__(409, message)


@dataclass(slots=True, eq=False)
class Running:
    """A running request of a sandbox. `table` has an extent for each page of its canvas, shared pages first."""

    number: int
    shared_prefix: bool
    canvas: Canvas
    extents: list[Extent]  # to release at the end
    table: list[Extent]
    cached_pages: int  # leading pages that the store had
    sharing: PageSharing | None


class Sandbox:
    """Requests of a block-causal model in a pool of `PAGES` pages of one layer, with the engine's page sharing.

    A prompt begins with the shared prefix, or has tokens of its own only. Not thread-safe.
    """

    def __init__(self) -> None:
        self.allocator = PageAllocator(len(LAYER), PAGES, PAGE_SIZE)
        self.chain = PageChain(self.allocator, PAGES * PAGE_SIZE, b"sandbox")
        self.caching = True
        self.requests: dict[int, Running] = {}
        self._last_number = 0

    def add(self, shared_prefix: bool) -> None:
        """Add a request and compute the part of its prompt that is not stored.

        Evicts stored pages that no request reads, if room is needed. Raises `PoolFullError` if that is not enough; the
        evictions are not undone.
        """
        number = self._last_number + 1
        first_token = NUMBER_STRIDE * number
        tokens = range(first_token, first_token + SHARED + 3 + number % 3)  # prompts of three lengths
        prompt = [*range(1, SHARED + 1), *tokens[SHARED:]] if shared_prefix else list(tokens)
        canvas = Canvas.masked(prompt, RESPONSE, MASK_ID)
        keys = self.chain.identities(prompt) if self.caching else []
        matches = self.chain.match(prompt, keys)
        pages = [page.extent for page in matches]
        while (new_pages := self.allocator.allocate(len(canvas) - len(pages) * PAGE_SIZE, LAYER)) is None:
            if not self.chain.evict_one():
                for page in pages:
                    self.allocator.release(page)
                raise PoolFullError(
                    f"the pool is full: {len(canvas)} positions do not fit in what is left of {PAGES} pages of "
                    f"{PAGE_SIZE}; finish a request first"
                )
        self.chain.record_lookup(matches, len(keys))
        extents = new_pages.split()
        sharing: PageSharing | None = None
        if self.caching:
            sharing = PageSharing(
                self.chain, canvas, BLOCK, block_offset=0, salt="", stored_pages=matches, extents=extents, keys=keys
            )
        self._last_number = number
        table = [*pages, *extents]
        request = Running(number, shared_prefix, canvas, [*pages, new_pages], table, len(matches), sharing)
        self.requests[number] = request
        _commit(request, len(prompt))

    def step(self) -> None:
        """Settle the current block of every request, and offer its complete pages to the store."""
        for request in self.requests.values():
            canvas = request.canvas
            noisy = np.flatnonzero(canvas.noisy)
            if not len(noisy):
                continue
            stop = min((int(noisy[0]) // BLOCK + 1) * BLOCK, len(canvas))
            block = noisy[noisy < stop]
            canvas.write(block, NUMBER_STRIDE * request.number + block)
            canvas.settle(block, 0)
            _commit(request, stop)

    def finish(self, number: int) -> bool:
        """Release the pages of a request. Returns False if there is no request of this number."""
        request = self.requests.pop(number, None)
        if request is None:
            return False
        for extent in request.extents:
            self.allocator.release(extent)
        self._stop_sharing(request)
        if not self.caching:
            self.chain.drop()
        return True

    def set_caching(self, enabled: bool) -> None:
        """Switch prefix caching. While it is off, nothing is looked up or stored, and unread pages are dropped."""
        self.caching = enabled
        if not enabled:
            for request in self.requests.values():
                self._stop_sharing(request)
            self.chain.drop()

    def state(self, session: str) -> SandboxState:
        """Return the whole state of the sandbox for the session with this name."""
        readers: dict[int, list[int]] = {page: [] for page in range(PAGES)}
        filled = dict.fromkeys(range(PAGES), 0)
        for request in self.requests.values():
            for extent in request.table:
                page = int(extent.pages[0])
                readers[page].append(request.number)
                filled[page] = extent.length
        stored_pages = {int(page.extent.pages[0]) for page in self.chain.pages}
        pages: list[SandboxPage] = [
            {
                "page": page,
                "references": int(self.allocator.references[0, page]),
                "requests": readers[page],
                "stored": page in stored_pages,
                "slots_filled": filled[page] if readers[page] else PAGE_SIZE * (page in stored_pages),
            }
            for page in range(PAGES)
        ]
        return {
            "session": session,
            "page_size": PAGE_SIZE,
            "caching": self.caching,
            "pages": pages,
            "requests": [_request_state(request) for request in self.requests.values()],
            "totals": self._totals(readers, filled),
        }

    def _totals(self, readers: dict[int, list[int]], filled: dict[int, int]) -> SandboxTotals:
        """The sums over all pages, from the requests that read each page and its slots that are `filled`."""
        in_use = [page for page in readers if readers[page]]
        slots = len(in_use) * PAGE_SIZE
        occupied = sum(filled[page] for page in in_use)
        return {
            "pages": PAGES,
            "pages_in_use": len(in_use),
            "pages_cached": self.allocator.used - len(in_use),
            "pages_shared": sum(len(readers[page]) > 1 for page in in_use),
            "pages_saved": sum(len(names) for names in readers.values()) - len(in_use),
            "slots_in_use": slots,
            "slots_wasted": slots - occupied,
            "utilisation": occupied / slots if slots else None,
            "tokens_queried": self.chain.stats.queries,
            "tokens_hit": self.chain.stats.hits,
            "evictions": self.chain.stats.evictions,
        }

    def _stop_sharing(self, request: Running) -> None:
        if request.sharing is not None:
            request.sharing.release()
            request.sharing = None


def _commit(request: Running, stop: int) -> None:
    """Commit the positions before `stop` that are final and not committed yet, as a pass of the engine does."""
    sharing = request.sharing
    if sharing is not None:
        positions = np.arange(len(request.canvas))
        rows: Mask = (positions >= sharing.committed) & (positions < stop)
        nothing: Mask = np.zeros(len(positions), dtype=np.bool_)
        sharing.record_pass(Plan((Span(LAYER, rows),), nothing), sharing.settled_length())


def _request_state(request: Running) -> SandboxRequest:
    canvas = request.canvas
    return {
        "request": request.number,
        "shared_prefix": request.shared_prefix,
        "page_table": [int(extent.pages[0]) for extent in request.table],
        "pages_found": request.cached_pages,
        "tokens": len(canvas),
        "prompt_tokens": canvas.prompt,
        "settled_tokens": canvas.settled_lead,
        "response_tokens": RESPONSE,
    }


class Sessions:
    """Sandboxes by session name. Names cannot be guessed. Above `limit` sessions the least recently used one ends."""

    def __init__(
        self, limit: int = MAX_SESSIONS, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.idle_s = idle_s
        self._clock = clock
        self._sandboxes: OrderedDict[str, tuple[float, Sandbox]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._sandboxes)

    def open(self) -> tuple[str, Sandbox]:
        """Begin a session. Returns its name and its sandbox."""
        self._expire()
        while len(self._sandboxes) >= self.limit:
            self._sandboxes.popitem(last=False)
        name = secrets.token_urlsafe(16)
        sandbox = Sandbox()
        self._sandboxes[name] = (self._clock(), sandbox)
        return name, sandbox

    def find(self, name: str) -> Sandbox:
        """Return the sandbox of a session. Raises a 404 if the session does not exist or has ended."""
        self._expire()
        if name not in self._sandboxes:
            raise ApiError(404, "there is no such session, or it has ended; POST /playground/pages begins a new one")
        sandbox = self._sandboxes[name][1]
        self._sandboxes[name] = (self._clock(), sandbox)
        self._sandboxes.move_to_end(name)
        return sandbox

    def close(self, name: str) -> None:
        """End a session. Raises a 404 if it does not exist or has ended."""
        self.find(name)
        del self._sandboxes[name]

    def _expire(self) -> None:
        oldest = self._clock() - self.idle_s
        while self._sandboxes and next(iter(self._sandboxes.values()))[0] < oldest:
            self._sandboxes.popitem(last=False)
