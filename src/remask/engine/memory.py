"""The memory of an engine: pages, the prefix store, and the placing of requests in them."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from remask.core.canvas import Canvas
from remask.core.ledger import Ledger
from remask.engine.canvas_state import CanvasState, leased_prefix, leased_tables, new_states, plain_table
from remask.engine.config import EngineConfig
from remask.engine.job import Job
from remask.engine.paged import Placement, place_paged
from remask.engine.request import Request
from remask.engine.tracker import Tracker
from remask.errors import ConfigError, IntegrityError
from remask.models.config import ModelConfig
from remask.models.pool import Pool
from remask.models.transformer import Transformer
from remask.policies.base import Traits
from remask.store.chain import PageChain
from remask.store.entry import Entry
from remask.store.pages import PageAllocator, PageRange
from remask.store.prefix import Lease, PrefixStore

DEFAULT_PAGE = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Share:
    """What a request would lease: the first `prefix` tokens in `boundary` layers, where it asked for `asked` tokens.

    `entry` holds them; None where a pass of its own is to publish them. With a boundary of 0 nothing is shared.
    """

    prefix: int
    boundary: int
    asked: int
    entry: Entry | None


_NOTHING = _Share(0, 0, 0, None)


class Memory:
    """One pool of pages for running requests and for the prefix store."""

    def __init__(self, model: Transformer, config: EngineConfig, max_model_len: int, fingerprint: str) -> None:
        shape = self.shape = model.config
        canvases = max(2, config.max_num_seqs)  # a guided request must be able to run alone
        size = _page_size(config.page_size, shape)
        # A lease splits a canvas in two, so a canvas may end one page later than its length says.
        pages = canvases + -(-(canvases * max_model_len + config.store_budget_tokens) // size)
        self.allocator = PageAllocator(shape.layers, pages, size)
        self.pool = Pool(shape, pages, size, model.dtype, model.device)
        salt = f"{fingerprint}:{model.dtype}".encode()
        self.extra_bytes = 0  # of running requests, beside their pages
        self.chain = PageChain(self.allocator, config.store_budget_tokens, salt)
        self.store = PrefixStore(
            allocator=self.allocator,
            budget_tokens=config.store_budget_tokens,
            eviction=config.eviction,
            salt=salt,
            slot_bytes=self.pool.k[0][0].nbytes + self.pool.v[0][0].nbytes,
            prefix_match=config.prefix_match,
            prefix_cover=config.prefix_cover,
            new_states=self.new_states,
        )

    def new_states(self, tokens: int) -> Tensor:
        """Room for the hidden states of so many positions, [layers - 1, tokens, D]."""
        pool = self.pool.k[0]
        return new_states(self.shape.layers, self.shape.hidden, pool.dtype, pool.device, tokens)

    @property
    def bytes_used(self) -> int:
        """Bytes of the pages in use and of the hidden states held, weights not counted."""
        page = self.allocator.page_size * self.pool.bytes_per_token
        return self.allocator.used * page + self.store.state_bytes + self.extra_bytes

    def place(self, job: Job) -> Placement:
        """Give a request its canvases, pages and lease.

        Nothing is leased where there is no room, or where another request is computing a page that this one awaits.
        Idle store entries give way to it, but not the one that it would read.
        """
        if job.policy.traits.pages:
            return place_paged(job, self.shape, self.chain)
        shape, request = self.shape, job.request
        canvases = [job.decoding.canvas()]
        if job.branches_needed == 2:
            canvases.append(_unconditional(canvases[0], shape.mask_id))
        share = self._share(job)
        while not (own := self._claim_all(job, [len(canvas) for canvas in canvases], share)):
            self.free(job)
            if not self.store.give_way(share.entry) and not self.chain.give_way():
                return "full"
            share = self._share(job)
        lease = self._lease(request, share)
        if share.boundary and lease is None:
            self.free(job)
            return "full"
        if job.policy.traits.needs_outputs:
            self.pool.keep_outputs()
        leases = [lease, None]  # only the conditional canvas starts with the shared prefix; the other one's is masked
        parts = zip(canvases, own, leases, strict=False)
        job.start(tuple(self._branch(*part, job.policy.traits) for part in parts), lease)
        self.extra_bytes += sum(branch.extra_bytes for branch in job.branches)
        if lease is not None:
            job.usage.prefix_depth, job.usage.prefix_note = share.boundary, None
            job.usage.cached_tokens = share.prefix if lease.hit else 0
        return "placed"

    def free(self, job: Job) -> None:
        """Take back all that a request owns and leases. Freeing twice changes nothing."""
        for extent in job.owned:
            self.allocator.release(extent)
        job.owned.clear()
        for branch in job.branches:
            self.extra_bytes -= branch.extra_bytes
            branch.states = branch.tracker = None
        if job.lease is not None:
            self.store.release(job.lease)
            job.lease = None
        if job.sharing is not None:
            job.sharing.release()
            job.sharing = None

    def check(self, jobs: Iterable[Job]) -> None:
        """Raise `IntegrityError` unless every page is owned by one of `jobs` or by a store entry, exactly once each."""
        expected = np.zeros_like(self.allocator.references)
        leases: dict[int, int] = {}
        owned = [entry.extent for entry in self.store.entries] + [page.extent for page in self.chain.pages]
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

    def _share(self, job: Job) -> _Share:
        """What of its shared prefix the request would lease as things stand."""
        request, shape = job.request, self.shape
        prompt = len(request.prompt_token_ids)
        canvas = job.decoding.length
        # The rows that predict the response must be live, so a prefix may not reach into them.
        prefix = min(request.prefix_length, prompt - shape.shift)
        boundary = job.policy.boundary(prefix, canvas, shape.layers) if prefix > 0 else 0
        if not boundary:
            return _NOTHING
        entry = self.store.find(request.prompt_token_ids[:prefix], request.cache_salt)
        if entry is not None:
            # The ratio r is that of what is read, not of what was asked for.
            depth = boundary if len(entry) == prefix else job.policy.boundary(len(entry), canvas, shape.layers)
            if depth:
                return _Share(len(entry), depth, prefix, entry)
        if self.store.fits(prefix):
            return _Share(prefix, boundary, prefix, None)
        # A request that waits for pages comes here again and again; it is refused once.
        if job.usage.prefix_note is None:
            budget = self.store.budget_tokens
            job.usage.prefix_note = f"prefix of {prefix} tokens exceeds the store's budget of {budget}"
            self.store.stats.refused += 1
            log.warning("request %s runs uncached: %s", request.id, job.usage.prefix_note)
        return _NOTHING

    def _lease(self, request: Request, share: _Share) -> Lease | None:
        """The lease of `share`; None where there is nothing to share, or no room for a new entry."""
        if not share.boundary:
            return None
        tokens = request.prompt_token_ids[: share.asked]
        if share.entry is not None:
            return self.store.lend(share.entry, share.boundary, tokens)
        return self.store.reserve(tokens, share.boundary, request.cache_salt)

    def _claim_all(self, job: Job, lengths: list[int], share: _Share) -> list[list[PageRange]]:
        """Pages of every canvas' own; empty where there are too few. The caller frees what was claimed until then."""
        own = []
        for i, length in enumerate(lengths):
            own.append(self._claim(job, length, share.prefix if i == 0 else 0, share.boundary))
            if not own[-1]:
                return []
        return own

    def _claim(self, job: Job, length: int, prefix: int, boundary: int) -> list[PageRange]:
        """Pages of a canvas' own: all of it, or what a lease leaves of it; empty where too few are free."""
        layers = self.shape.layers
        wanted = [(length - prefix, range(boundary)), (length, range(boundary, layers))]
        if not prefix:
            wanted = [(length, range(layers))]
        own: list[PageRange] = []
        for tokens, span in wanted:
            if not len(span):
                continue
            extent = self.allocator.allocate(tokens, span)
            if extent is None:
                return []
            own.append(extent)
            job.owned.append(extent)
        return own

    def _branch(self, canvas: Canvas, own: list[PageRange], lease: Lease | None, traits: Traits) -> CanvasState:
        shape, device = self.shape, self.pool.k[0].device
        states = self.new_states(len(canvas)) if traits.watches else None
        return CanvasState(
            canvas=canvas,
            ledger=Ledger(shape.layers, len(canvas), leased_prefix(lease)),
            tables=(plain_table(own[0]),) if lease is None else leased_tables(lease, own),
            prefix=leased_prefix(lease),
            lease=lease,
            restored=states if lease is None else lease.entry.states,
            states=states,
            shift=shape.shift,
            outputs=traits.needs_outputs,
            tracker=Tracker.of(shape.layers, len(canvas), device) if traits.watches else None,
        )


def _unconditional(canvas: Canvas, mask_id: int) -> Canvas:
    """The other branch of a guided pair: the same canvas with every prompt position masked (LLaDA's guidance)."""
    return Canvas.masked([mask_id] * canvas.prompt, len(canvas) - canvas.prompt, mask_id)


def _page_size(size: int | None, shape: ModelConfig) -> int:
    """Token slots a page: as asked, or the least whole number of blocks that is at least 16.

    Raises `ConfigError` where pages of `size` hold no whole number of the model's blocks.
    """
    block = shape.block_length or 1
    if size is None:
        return -(-DEFAULT_PAGE // block) * block
    if size % block:
        near = -(-size // block) * block
        raise ConfigError(
            f"page_size={size} is not a multiple of the model's block of {block}; use {near}, or leave it"
        )
    return size
