"""The memory of an engine: K/V pages, the stores of shared K/V, and the placement of requests."""

import logging
from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, SlotTable, allocate_states, plain_table
from remask.engine.capacity import gigabytes, resolve_page_size, token_bytes
from remask.engine.config import EngineConfig
from remask.engine.placement import Claim, Decision, NoRoom, Placement, SharedKV
from remask.engine.request import PendingRequest
from remask.engine.running import RequestRecord, RunningRequest
from remask.engine.sharing import Pages, Prefixes, Sharing
from remask.engine.sizing import divide_memory
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
        """`depths` are those that audits have earned; None if they earn none.

        Raises `ConfigError` if K/V do not fit into the memory of the device.
        """
        model_config = model.config
        self.model, self.model_config = model, model_config
        canvas_count = max(2, config.max_num_seqs)  # a guided request must be able to run alone
        page_size = resolve_page_size(config.page_size, model_config)
        room = divide_memory(model, config, canvas_count, max_model_len, page_size)
        self.store_budget = room.store_tokens
        self.pass_rows = room.max_rows
        self.max_model_len = room.max_canvas  # in tokens; may be less than the parameter
        self.recent = RecentPrompts(min_shared=config.prefix_min)
        self._config = config
        self._depths = depths
        self._page_size = page_size
        self._page_count = -(-(room.running_tokens + room.store_tokens) // page_size)
        self._salt = f"{fingerprint}:{model.dtype}".encode()
        self._spare_bytes = room.spare_bytes
        token = token_bytes(model_config, model.dtype.itemsize, model.ranks.shard.size, model.kv_dtype.itemsize)
        slot_count = self._page_count * page_size
        purpose = (
            f"{gigabytes(slot_count * token.kv)} of K/V for {slot_count} tokens (max_num_seqs={config.max_num_seqs}, "
            f"canvases of up to {room.max_canvas} tokens, {room.store_tokens} stored)"
        )
        with allocating(purpose, "a lower --max-num-seqs or --max-model-len", model.device):
            self.pool = model.ranks.run_on_all(_new_pool, model, self._page_count, page_size)
        self._create_stores()

    def _create_stores(self) -> None:
        """Set a new allocator, on which no page is in use, and empty stores."""
        config = self._config
        self.allocator = PageAllocator(self.model_config.layers, self._page_count, self._page_size)
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
        self.prefixes = Prefixes(config, self.model_config, self.store, self.recent, self._depths)
        self.exact_pages = Pages(self.chain, self.model_config.layers)

    def reset(self) -> None:
        """Forget all pages and prefixes; tensors and counters are kept. Raises what a lost device raises."""
        old_store, old_chain = self.store, self.chain
        self._create_stores()
        self.store.stats = old_store.stats
        self.chain.stats = old_chain.stats
        self.chain.listener = old_chain.listener
        if old_chain.listener is not None:
            old_chain.listener.on_cleared()
        self.model.ranks.run_on_all(_check_device, self.model)

    def check_outputs_fit(self, policy: CachePolicy) -> None:
        """Raise `ConfigError` if `policy` keeps attention and FFN outputs, and the device has no room for them."""
        if self._spare_bytes is None or "outputs" not in policy.traits.keeps or self.pool.outputs:
            return
        config, itemsize = self.model_config, self.model.dtype.itemsize
        output_bytes = 2 * config.layers * config.hidden * itemsize  # of one token
        required = (self._page_count * self._page_size + 1) * output_bytes
        if required <= self._spare_bytes:
            return
        stored = token_bytes(config, itemsize, self.model.ranks.shard.size, self.model.kv_dtype.itemsize)
        excess_tokens = -(-(required - self._spare_bytes) // (stored.kv + stored.state + output_bytes))
        fitting = self.store_budget - excess_tokens - self._page_size  # a page less, as the budget is rounded to pages
        way_out = f"--store-budget-tokens {fitting}, " if fitting >= 0 else ""
        raise ConfigError(
            f"this cache policy keeps outputs of attention and feed-forward of all layers, {gigabytes(required)} for "
            f"{self._page_count * self._page_size} tokens of K/V, and {gigabytes(max(0, self._spare_bytes))} are left; "
            f"use {way_out}a lower --max-num-seqs or --max-model-len, or another policy"
        )

    def new_states(self, token_count: int) -> Tensor:
        """A new tensor for the hidden states of `token_count` positions, [layers - 1, token_count, D]."""
        return self.model.ranks.run_on_all(_allocate_states, self.model, token_count)

    @property
    def bytes_used(self) -> int:
        """Bytes of the pages in use and of all hidden states, without weights."""
        pages = self.pool.bytes_of(self.allocator.used * self.allocator.page_size)
        return pages + self.store.state_bytes + self.extra_bytes

    def plan(self, pending: PendingRequest) -> Decision:
        """The place of a request; see `Sharing.plan`."""
        return self._sharing_of(pending).plan(pending)

    def has_spare_canvas(self, pending: PendingRequest) -> bool:
        """Whether a canvas of the largest size would fit beside a request, once idle prefixes and pages are evicted."""
        free = int((self.allocator.references == 0).all(axis=0).sum()) + self.store.idle_pages + self.chain.idle_pages
        pages_for = self.allocator.pages_for
        return pending.canvas_count * pages_for(pending.decoding.length) + pages_for(self.max_model_len) + 1 <= free

    def evict_one(self, shortage: NoRoom) -> bool:
        """Evict a stored prefix or page that no request reads, and that the request without room would not read either.

        Returns False if there is none, or if evicting does not help.
        """
        return shortage.evictable and (self.store.evict_one(shortage.entry) or self.chain.evict_one(shortage.pages))

    def place(
        self, pending: PendingRequest, placement: Placement, predecessor: RunningRequest | None = None
    ) -> RunningRequest:
        """Claim the memory of a placement that `plan` has just returned. If that raises, nothing is claimed.

        `predecessor` is the request before its canvas grew; None on its first canvas.
        """
        with ExitStack() as undo:
            running = self._place(pending, placement, predecessor, undo)
            undo.pop_all()
        reason = placement.unread_reason
        if reason is not None and predecessor is None:
            self.store.stats.unread_reasons[reason.label] += 1
            if reason.label == "budget":
                log.warning("request %s: %s", pending.request.id, reason.note)
        self.extra_bytes += sum(state.extra_bytes for state in running.canvases)
        return running

    def _place(
        self, pending: PendingRequest, placement: Placement, predecessor: RunningRequest | None, undo: ExitStack
    ) -> RunningRequest:
        """Claim the memory of a placement for `place`. For each claim the call that frees it is pushed to `undo`."""
        request, traits = pending.request, placement.policy.traits
        canvas = pending.decoding.canvas() if predecessor is None else predecessor.canvases[0].canvas
        if "outputs" in traits.keeps:
            self.pool.allocate_outputs()
        extents = [extent for canvas_extents in placement.extents for extent in canvas_extents]
        for extent in extents:
            self.allocator.claim(extent)
            undo.callback(self.allocator.release, extent)
        shared = self._sharing_of(pending).claim(pending, placement, canvas, undo)
        adapter = request.adapter
        states = [self._new_state(canvas, shared.tables(placement.extents[0]), traits, shared=shared, adapter=adapter)]
        if pending.canvas_count == 2:
            # Only the conditional canvas begins with the shared prefix: the other one's prompt is masked.
            if predecessor is None:
                second_canvas = _unconditional(canvas, self.model_config.mask_id, request.template)
            else:
                second_canvas = predecessor.canvases[1].canvas
            tables = (plain_table(placement.extents[1][0]),)
            second_traits = placement.policy.without_prefix.traits
            states.append(self._new_state(second_canvas, tables, second_traits, shared=SharedKV(), adapter=adapter))
        record = _new_record(pending, placement, shared) if predecessor is None else predecessor.record
        extents += [page.extent for page in shared.pages]
        claim = Claim(extents, shared.lease, shared.publisher, move=shared.move(states[0].slots(0)))
        return RunningRequest(
            pending,
            placement.policy,
            tuple(states),
            claim,
            record=record,
            config=self.model_config,
            predecessor=predecessor,
        )

    def free(self, running: RunningRequest) -> None:
        """Free all pages and leases of a request. Freeing it twice changes nothing."""
        claim = running.claim
        for extent in claim.extents:
            self.allocator.release(extent)
        claim.extents.clear()
        self.free_states(running.canvases)
        for state in running.canvases:
            state.hook_state = None
        if claim.lease is not None:
            self.store.release(claim.lease)
            claim.lease = None
        if claim.publisher is not None:
            claim.publisher.release()
            claim.publisher = None

    def free_states(self, canvases: Iterable[CanvasState]) -> None:
        """Free the saved hidden states of canvases."""
        for state in canvases:
            self.extra_bytes -= state.extra_bytes
            state.states = None

    def check(self, requests: Iterable[RunningRequest]) -> None:
        """Raise `IntegrityError` unless reference counts of pages and leases are those of `requests` and the stores."""
        expected = np.zeros_like(self.allocator.references)
        leases: dict[int, int] = {}  # by id() of the entry
        extents = [entry.extent for entry in self.store.entries] + [page.extent for page in self.chain.pages]
        for running in requests:
            extents += running.claim.extents
            lease = running.claim.lease
            if lease is not None:
                extents.append(lease.extent)
                leases[id(lease.entry)] = leases.get(id(lease.entry), 0) + 1
        for extent in extents:
            expected[extent.layers.start : extent.layers.stop, extent.pages] += 1
        if not np.array_equal(expected, self.allocator.references):
            wrong = np.argwhere(expected != self.allocator.references)
            raise IntegrityError(f"{len(wrong)} page counts are off, the first at (layer, page) {wrong[0].tolist()}")
        for entry in self.store.entries:
            if entry.leases != leases.get(id(entry), 0):
                raise IntegrityError(f"a prefix of {len(entry)} tokens has {entry.leases} leases that nobody holds")

    def _sharing_of(self, pending: PendingRequest) -> Sharing:
        return self.exact_pages if pending.request.policy.traits.sharing == "pages" else self.prefixes

    def _new_state(
        self, canvas: Canvas, tables: tuple[SlotTable, ...], traits: Traits, *, shared: SharedKV, adapter: str | None
    ) -> CanvasState:
        """The state of a canvas with these slots. Allocates hidden states if the policy keeps inputs of layers."""
        model_config, prefix = self.model_config, shared.prefix
        states = self.new_states(len(canvas)) if "inputs" in traits.keeps else None
        return CanvasState(
            canvas=canvas,
            ledger=Ledger(model_config.layers, len(canvas), prefix),
            tables=tables,
            prefix=prefix,
            lease=shared.lease_in_place,
            restore_states=states if shared.lease is None else shared.lease.entry.states,
            states=states,
            shift=model_config.shift,
            routing_block=model_config.routing_block,
            adapter=adapter,
            keeps_outputs="outputs" in traits.keeps,
            page_key=shared.pages[-1].key if shared.pages else 0,
        )


def _new_record(pending: PendingRequest, placement: Placement, shared: SharedKV) -> RequestRecord:
    """The record of a request that begins.

    Its `prefix_length` tokens are shared, by a lease or without one (`unleased_prefix`). The request reads
    `Usage.prefix_tokens` of them from the store, of which `Usage.cached_tokens` were stored before.
    """
    policy, reason = placement.policy, placement.unread_reason
    usage = Usage(
        prompt_tokens=pending.input_tokens,
        prefix_note=None if reason is None else reason.note,
        approximation=None if policy.traits.exact else name_of(policy),
    )
    if shared.prefix is not None:
        usage.prefix_depth = shared.prefix.boundary
        usage.prefix_tokens = shared.prefix.length
        usage.cached_tokens = shared.cached_tokens
    lease = placement.lease
    prefix_length = placement.unleased_prefix if lease is None else lease.prefix.length
    return RequestRecord(usage, prefix_length=prefix_length)


def _new_pool(model: Transformer, page_count: int, page_size: int) -> Pool:
    return Pool(model.rank_config, page_count, page_size, model.kv_dtype, model.device, model.dtype)


def _allocate_states(model: Transformer, token_count: int) -> Tensor:
    return allocate_states(model.config.layers, model.config.hidden, model.dtype, model.device, token_count)


def _check_device(model: Transformer) -> None:
    """Use the device, which raises if an earlier error has broken it."""
    torch.ones(1, device=model.device).item()


def _unconditional(canvas: Canvas, mask_id: int, template: Template | None) -> Canvas:
    """The unconditional canvas of a guided pair: `canvas` with all prompt positions masked (LLaDA's guidance)."""
    return Canvas.masked([mask_id] * canvas.prompt, len(canvas) - canvas.prompt, mask_id, template)
