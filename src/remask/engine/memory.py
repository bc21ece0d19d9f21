"""The memory of an engine: pages, the prefix store, and the placing of requests in them."""

import logging
from collections.abc import Iterable

import numpy as np

from remask.core.canvas import Canvas
from remask.core.ledger import Ledger
from remask.engine.branch import Branch, leased_prefix, leased_tables, new_states, plain_table
from remask.engine.config import EngineConfig
from remask.engine.job import Job
from remask.errors import IntegrityError
from remask.models.pool import Pool
from remask.models.transformer import Transformer
from remask.store.pages import Extent, PageAllocator
from remask.store.prefix import Lease, PrefixStore

log = logging.getLogger(__name__)


class Memory:
    """One pool of pages for running requests and for the prefix store."""

    def __init__(self, model: Transformer, config: EngineConfig, max_model_len: int, fingerprint: str) -> None:
        shape = self.shape = model.config
        canvases = max(2, config.max_num_seqs)  # a guided request must be able to run alone
        # A lease splits a canvas in two, so a canvas may end one page later than its length says.
        pages = canvases + -(-(canvases * max_model_len + config.store_budget_tokens) // config.page_size)
        self.allocator = PageAllocator(shape.layers, pages, config.page_size)
        self.pool = Pool(shape, pages, config.page_size, model.dtype, model.device)
        self.store = PrefixStore(
            allocator=self.allocator,
            budget_tokens=config.store_budget_tokens,
            eviction=config.eviction,
            salt=f"{fingerprint}:{model.dtype}".encode(),
            new_states=lambda tokens: new_states(shape.layers, shape.hidden, model.dtype, model.device, tokens),
        )

    @property
    def bytes_used(self) -> int:
        """Bytes of the pages in use and of the boundary states held, weights not counted."""
        page = self.allocator.page_size * self.pool.bytes_per_token
        return self.allocator.used * page + self.store.state_bytes

    def place(self, job: Job) -> bool:
        """Give a request its canvases, pages and lease; False, with nothing changed, where there is no room."""
        shape, request = self.shape, job.request
        prefix, boundary = self._shareable(job)
        canvases = [Canvas(request.prompt_token_ids, request.params.max_tokens, shape.mask_id)]
        if job.branches_needed == 2:
            canvases.append(_unconditional(canvases[0], shape.mask_id))
        own = self._claim_all(job, [len(canvas) for canvas in canvases], prefix, boundary)
        lease: Lease | None = None
        if own and boundary:
            tokens = request.prompt_token_ids[:prefix]
            salt = request.cache_salt
            lease = self.store.match(tokens, boundary, salt) or self.store.reserve(tokens, boundary, salt)
        if not own or (boundary and lease is None):
            self.free(job)
            return False
        outputs = job.policy.traits.needs_outputs
        if outputs:
            self.pool.keep_outputs()
        leases = [lease, None]  # only the conditional canvas starts with the shared prefix; the other one's is masked
        parts = zip(canvases, own, leases, strict=False)
        job.start(tuple(self._branch(*part, outputs) for part in parts), lease)
        if lease is not None:
            job.usage.prefix_depth = boundary
            job.usage.cached_tokens = prefix if lease.hit else 0
        return True

    def free(self, job: Job) -> None:
        """Take back all that a request owns and leases. Freeing twice changes nothing."""
        for extent in job.owned:
            self.allocator.release(extent)
        job.owned.clear()
        if job.lease is not None:
            self.store.release(job.lease)
            job.lease = None

    def check(self, jobs: Iterable[Job]) -> None:
        """Raise `IntegrityError` unless every page is owned by one of `jobs` or by a store entry, exactly once each."""
        expected = np.zeros_like(self.allocator.references)
        leases: dict[int, int] = {}
        owned = [entry.extent for entry in self.store.entries]
        for job in jobs:
            owned += job.owned
            if job.lease is not None:
                owned.append(job.lease.extent)
                leases[id(job.lease.entry)] = leases.get(id(job.lease.entry), 0) + 1
        for extent in owned:
            expected[extent.layers.start : extent.layers.stop, extent.pages] += 1
        if not np.array_equal(expected, self.allocator.references):
            wrong = np.argwhere(expected != self.allocator.references)
            raise IntegrityError(f"{len(wrong)} page counts are off, the first at (layer, page) {wrong[0].tolist()}")
        for entry in self.store.entries:
            if entry.leases != leases.get(id(entry), 0):
                raise IntegrityError(f"a prefix of {len(entry)} tokens has {entry.leases} leases that nobody holds")

    def _shareable(self, job: Job) -> tuple[int, int]:
        """Length of the prefix that can be leased, and how many layers would read it; (0, 0) where none does."""
        request, shape = job.request, self.shape
        prompt = len(request.prompt_token_ids)
        # The rows that predict the response must be live, so a prefix may not reach into them.
        prefix = min(request.prefix_length, prompt - shape.shift)
        if prefix < 1:
            return 0, 0
        boundary = job.policy.boundary(prefix, prompt + request.params.max_tokens, shape.layers)
        if boundary and not self.store.fits(prefix):
            # A request that waits for pages comes here again and again; it is refused once.
            if job.usage.prefix_note is None:
                budget = self.store.budget_tokens
                job.usage.prefix_note = f"prefix of {prefix} tokens exceeds the store's budget of {budget}"
                self.store.stats.refused += 1
                log.warning("request %s runs uncached: %s", request.id, job.usage.prefix_note)
            return 0, 0
        return prefix, boundary

    def _claim_all(self, job: Job, lengths: list[int], prefix: int, boundary: int) -> list[list[Extent]]:
        """Pages of every canvas' own, for which idle store entries give way; empty, and none claimed, on failure."""
        while True:
            own = [self._claim(job, length, prefix if i == 0 else 0, boundary) for i, length in enumerate(lengths)]
            if all(own):
                return own
            self.free(job)
            if not self.store.give_way():
                return []

    def _claim(self, job: Job, length: int, prefix: int, boundary: int) -> list[Extent]:
        """Pages of a canvas' own: all of it, or what a lease leaves of it; empty where too few are free."""
        layers = self.shape.layers
        wanted = [(length - prefix, range(boundary)), (length, range(boundary, layers))]
        if not prefix:
            wanted = [(length, range(layers))]
        own: list[Extent] = []
        for tokens, span in wanted:
            if not len(span):
                continue
            extent = self.allocator.allocate(tokens, span)
            if extent is None:
                return []
            own.append(extent)
            job.owned.append(extent)
        return own

    def _branch(self, canvas: Canvas, own: list[Extent], lease: Lease | None, outputs: bool) -> Branch:
        shape = self.shape
        return Branch(
            canvas=canvas,
            ledger=Ledger(shape.layers, len(canvas), leased_prefix(lease)),
            tables=(plain_table(own[0]),) if lease is None else leased_tables(lease, own),
            lease=lease,
            restored=None if lease is None else lease.entry.states,
            shift=shape.shift,
            outputs=outputs,
        )


def _unconditional(canvas: Canvas, mask_id: int) -> Canvas:
    """The other branch of a guided pair: the same canvas with every prompt position masked (LLaDA's guidance)."""
    return Canvas([mask_id] * canvas.prompt, len(canvas) - canvas.prompt, mask_id)
