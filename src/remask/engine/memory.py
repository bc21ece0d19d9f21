"""The memory of an engine: K/V pages, the stores of shared K/V, and the placement of requests."""

import logging
from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, SlotTable, new_states, plain_table
from remask.engine.capacity import gigabytes, page_size, token_bytes
from remask.engine.config import EngineConfig
from remask.engine.placement import Claim, Decision, NoRoom, Placement, Shared
from remask.engine.request import PendingRequest
from remask.engine.running import RequestRecord, RunningRequest
from remask.engine.sharing import Pages, Prefixes, Sharing
from remask.engine.sizing import share_out
from remask.errors import ConfigError, IntegrityError
from remask.machine.device import allocating
from remask.model.pool import Pool
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas, Ledger, Template
from remask.policies.base import CachePolicy, Traits
from remask.policies.earned import EarnedDepths
from remask.policies.registry import name_of
from remask.request.result import Usage
from remask.store.chain import PageChain
from remask.store.pages import PageAllocator
from remask.store.prefix import PrefixStore
from remask.store.recent import RecentPrompts

NOTHING = Shared()

log = logging.getLogger(__name__)


class Memory:
    """One pool of pages for running requests and for the prefix store."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        max_model_len: int,
        fingerprint: str,
        depths: EarnedDepths | None = None,
    ) -> None:
        """`depths` are those that audits have earned; None: they earn none."""
        shape, self.model, self._depths = model.config, model, depths
        self.shape = shape
        canvases = max(2, config.max_num_seqs)  # a guided request must be able to run alone
        size = page_size(config.page_size, shape)
        # A lease splits a canvas in two, so a canvas may end one page later than its length says.
        room = share_out(model, config, canvases, max_model_len, size)
        self.store_budget, self.pass_rows, self._spare = room.store, room.rows, room.spare
        self.max_model_len = room.longest  # the longest canvas in tokens, which may be shorter than what was asked for
        self._pages = -(-(room.running + self.store_budget) // size)
        self._config, self._size = config, size
        self._salt = f"{fingerprint}:{model.dtype}".encode()
        self.recent = RecentPrompts(min_shared=config.prefix_min)
        kv = self._pages * size * token_bytes(shape, 1, model.ranks.shard.size, model.kv_dtype.itemsize).kv
        what = (
            f"{gigabytes(kv)} of K/V for {self._pages * size} tokens (max_num_seqs={config.max_num_seqs}, canvases of "
            f"up to {room.longest} tokens, {room.store} stored)"
        )
        with allocating(what, "a lower --max-num-seqs or --max-model-len", model.device):
            self.pool = model.ranks.everywhere(_new_pool, model, self._pages, size)
        self._begin()

    def _begin(self) -> None:
        config = self._config
        self.allocator = PageAllocator(self.shape.layers, self._pages, self._size)
        self.extra_bytes = 0  # of running requests, in addition to their pages
        self.chain = PageChain(self.allocator, self.store_budget, self._salt)
        self.store = PrefixStore(
            allocator=self.allocator,
            budget_tokens=self.store_budget,
            eviction=config.eviction,
            salt=self._salt,
            slot_bytes=self.pool.k[0][0].nbytes + self.pool.v[0][0].nbytes,
            prefix_match=config.prefix_match,
            prefix_cover=config.prefix_cover,
            new_states=self.new_states,
        )
        self.prefixes = Prefixes(config, self.shape, self.store, self.recent, self._depths)
        self.exact_pages = Pages(self.chain, self.shape.layers)

    def reset(self) -> None:
        """Forget all pages and prefixes; tensors and counters are kept. Raises what a lost device raises."""
        store, chain = self.store.stats, self.chain
        self._begin()
        self.store.stats, self.chain.stats, self.chain.listener = store, chain.stats, chain.listener
        if chain.listener is not None:
            chain.listener.on_cleared()
        self.model.ranks.everywhere(_check_device, self.model)

    def check_kept(self, policy: CachePolicy) -> None:
        """Raise `ConfigError` where the device has no room for the tensors that `policy` keeps in addition to K/V."""
        if self._spare is None or "outputs" not in policy.traits.keeps or self.pool.outputs:
            return
        config, item = self.shape, self.model.dtype.itemsize
        token = 2 * config.layers * config.hidden * item
        needed = (self._pages * self._size + 1) * token
        if needed <= self._spare:
            return
        stored = token_bytes(config, item, self.model.ranks.shard.size, self.model.kv_dtype.itemsize)
        less = -(-(needed - self._spare) // (stored.kv + stored.state + token))
        fitting = self.store_budget - less - self._size  # as pages are whole
        way = f"--store-budget-tokens {fitting}, " if fitting >= 0 else ""
        raise ConfigError(
            f"this cache policy keeps outputs of attention and feed-forward of all layers, {gigabytes(needed)} for "
            f"{self._pages * self._size} tokens of K/V, and {gigabytes(max(0, self._spare))} are left; use {way}"
            "a lower --max-num-seqs or --max-model-len, or another policy"
        )

    def new_states(self, tokens: int) -> Tensor:
        """A new tensor for the hidden states of `tokens` positions, [layers - 1, tokens, D]."""
        return self.model.ranks.everywhere(_new_states, self.model, tokens)

    @property
    def bytes_used(self) -> int:
        """Bytes of the pages in use and of the hidden states held, weights not counted."""
        pages = self.pool.bytes_of(self.allocator.used * self.allocator.page_size)
        return pages + self.store.state_bytes + self.extra_bytes

    def plan(self, pending: PendingRequest) -> Decision:
        """See `Sharing.plan`."""
        return self._way(pending).plan(pending)

    def spares(self, pending: PendingRequest) -> bool:
        """Whether another of the longest canvases has room beside a request, idle prefixes and pages evicted."""
        free = int((self.allocator.references == 0).all(axis=0).sum()) + self.store.idle_pages + self.chain.idle_pages
        pages_for = self.allocator.pages_for
        return pending.canvases * pages_for(pending.decoding.length) + pages_for(self.max_model_len) + 1 <= free

    def give_way(self, waiting: NoRoom) -> bool:
        """Evict a stored prefix or page that no request reads, and that `waiting` would not; False: none is left."""
        return waiting.evictable and (self.store.evict_one(waiting.entry) or self.chain.evict_one(waiting.pages))

    def place(
        self, pending: PendingRequest, placement: Placement, before: RunningRequest | None = None
    ) -> RunningRequest:
        """Give a request what `plan` decided just now, or nothing; `before` is the one before its canvas grew."""
        with ExitStack() as undo:
            running = self._place(pending, placement, before, undo)
            undo.pop_all()
        if placement.unread is not None and before is None:
            self.store.stats.unread_reasons[placement.unread.reason] += 1
            if placement.unread.reason == "budget":
                log.warning("request %s: %s", pending.request.id, placement.unread.note)
        self.extra_bytes += sum(state.extra_bytes for state in running.canvases)
        return running

    def _place(
        self, pending: PendingRequest, placement: Placement, before: RunningRequest | None, undo: ExitStack
    ) -> RunningRequest:
        """`undo` gets what gives back each thing that is claimed."""
        request, traits = pending.request, placement.policy.traits
        canvas = pending.decoding.canvas() if before is None else before.canvases[0].canvas
        if "outputs" in traits.keeps:
            self.pool.keep_outputs()
        owned = [extent for canvas in placement.own for extent in canvas]
        for extent in owned:
            self.allocator.claim(extent)
            undo.callback(self.allocator.release, extent)
        shared = self._way(pending).claim(pending, placement, canvas, undo)
        adapter = request.adapter
        first = self._state(canvas, shared.tables(placement.own[0]), traits, shared, adapter)
        states = [first]
        if pending.canvases == 2:
            # Only the conditional canvas begins with the shared prefix: the other one's prompt is masked.
            if before is None:
                other = _unconditional(canvas, self.shape.mask_id, request.template)
            else:
                other = before.canvases[1].canvas
            alone = placement.policy.without_prefix.traits
            states.append(self._state(other, (plain_table(placement.own[1][0]),), alone, NOTHING, adapter))
        record = _record(pending, placement, shared) if before is None else before.record
        owned += [page.extent for page in shared.pages]
        claim = Claim(owned, shared.lease, shared.publishes, shared.move(first.slots(0)))
        return RunningRequest(pending, placement.policy, tuple(states), claim, record, self.shape, before)

    def free(self, running: RunningRequest) -> None:
        """Free all pages and leases of a request. Freeing it twice changes nothing."""
        claim = running.claim
        for extent in claim.owned:
            self.allocator.release(extent)
        claim.owned.clear()
        for state in running.canvases:
            self.extra_bytes -= state.extra_bytes
            state.states = state.hook_state = None
        if claim.lease is not None:
            self.store.release(claim.lease)
            claim.lease = None
        if claim.shares is not None:
            claim.shares.release()
            claim.shares = None

    def forget_inputs(self, canvases: Iterable[CanvasState]) -> None:
        """Free the hidden states of canvases that are no longer needed."""
        for state in canvases:
            self.extra_bytes -= state.extra_bytes
            state.states = None

    def check(self, requests: Iterable[RunningRequest]) -> None:
        """Raise `IntegrityError` unless `requests` and the store own the pages that are in use, each exactly once."""
        expected = np.zeros_like(self.allocator.references)
        leases: dict[int, int] = {}
        owned = [entry.extent for entry in self.store.entries] + [page.extent for page in self.chain.pages]
        for running in requests:
            owned += running.claim.owned
            if (lease := running.claim.lease) is not None:
                owned.append(lease.extent)
                leases[id(lease.entry)] = leases.get(id(lease.entry), 0) + 1
        for extent in owned:
            expected[extent.layers.start : extent.layers.stop, extent.pages] += 1
        if not np.array_equal(expected, self.allocator.references):
            wrong = np.argwhere(expected != self.allocator.references)
            raise IntegrityError(f"{len(wrong)} page counts are off, the first at (layer, page) {wrong[0].tolist()}")
        for entry in self.store.entries:
            if entry.leases != leases.get(id(entry), 0):
                raise IntegrityError(f"a prefix of {len(entry)} tokens has {entry.leases} leases that nobody holds")

    def _way(self, pending: PendingRequest) -> Sharing:
        return self.exact_pages if pending.request.policy.traits.sharing == "pages" else self.prefixes

    def _state(
        self, canvas: Canvas, tables: tuple[SlotTable, ...], traits: Traits, shared: Shared, adapter: str | None
    ) -> CanvasState:
        shape, prefix = self.shape, shared.prefix
        states = self.new_states(len(canvas)) if "inputs" in traits.keeps else None
        return CanvasState(
            canvas=canvas,
            ledger=Ledger(shape.layers, len(canvas), prefix),
            tables=tables,
            prefix=prefix,
            lease=shared.front,
            restored=states if shared.lease is None else shared.lease.entry.states,
            states=states,
            shift=shape.shift,
            routing=shape.routing_block,
            adapter=adapter,
            outputs="outputs" in traits.keeps,
            chain=shared.pages[-1].key if shared.pages else 0,
        )


def _record(pending: PendingRequest, placement: Placement, shared: Shared) -> RequestRecord:
    policy, unread = placement.policy, placement.unread
    usage = Usage(
        prompt_tokens=pending.given_tokens,
        prefix_note=None if unread is None else unread.note,
        approximation=None if policy.traits.exact else name_of(policy),
    )
    if shared.prefix is not None:
        usage.prefix_depth, usage.prefix_tokens = shared.prefix.boundary, shared.prefix.length
        usage.cached_tokens = shared.found_tokens
    return RequestRecord(usage, prefix=placement.kept if placement.lease is None else placement.lease.prefix.length)


def _new_pool(model: Transformer, pages: int, page_size: int) -> Pool:
    return Pool(model.part, pages, page_size, model.kv_dtype, model.device, model.dtype)


def _new_states(model: Transformer, tokens: int) -> Tensor:
    return new_states(model.config.layers, model.config.hidden, model.dtype, model.device, tokens)


def _check_device(model: Transformer) -> None:
    """Raise what a lost device raises: an error that it cannot recover from comes with its next use."""
    torch.ones(1, device=model.device).item()


def _unconditional(canvas: Canvas, mask_id: int, template: Template | None) -> Canvas:
    """The other branch of a guided pair: the same canvas with every prompt position masked (LLaDA's guidance)."""
    return Canvas.masked([mask_id] * canvas.prompt, len(canvas) - canvas.prompt, mask_id, template)
