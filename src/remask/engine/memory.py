"""The memory of an engine: pages, the prefix store, and the placing of requests in them."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from remask.core.canvas import Canvas, Template
from remask.core.depth import percent
from remask.core.ledger import Ledger
from remask.core.plan import PrefixHit
from remask.core.request import Usage
from remask.core.segments import stored_parts
from remask.engine.audits import AuditPass, Audits
from remask.engine.canvas_state import (
    CanvasState,
    Kept,
    Move,
    SlotTable,
    leased_tables,
    new_states,
    plain_table,
    shared_table,
)
from remask.engine.capacity import (
    DeviceMemory,
    attention_bytes,
    gigabytes,
    pass_rows,
    store_tokens,
    token_bytes,
    workspace_bytes,
)
from remask.engine.config import DEFAULT_STORE_TOKENS, DEFAULT_UTILIZATION, EngineConfig
from remask.engine.pending import PendingRequest
from remask.engine.placement import AuditPlan, Awaiting, Decision, LeasePlan, NoRoom, PagePlan, PartPlan, Placement
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.engine.sharing import PageSharing
from remask.engine.tracker import Tracker
from remask.errors import ConfigError, IntegrityError
from remask.models.config import ModelConfig
from remask.models.graphs import MOST_ROWS, graph_bytes
from remask.models.pool import Pool
from remask.models.transformer import Transformer
from remask.policies.base import CachePolicy, Traits
from remask.store.chain import Page, PageChain
from remask.store.entry import PrefixEntry
from remask.store.pages import PageAllocator, PageRange
from remask.store.prefix import Lease, PrefixStore
from remask.store.recent import RecentPrompts

DEFAULT_PAGE = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a request would read of its shared prefix.

    Attributes:
        lease: what it would lease.
        audit: what audits have to do with its depth, where they bound it.
        unknown: the audit without which nobody knows how deep it may read.
        note: why it leases nothing although it asked to.
        refused: its prefix is larger than the whole store may be.
    """

    lease: LeasePlan | None = None
    audit: AuditPlan | None = None
    unknown: AuditPlan | None = None
    note: str | None = None
    refused: bool = False


class Memory:
    """One pool of pages for running requests and for the prefix store."""

    def __init__(self, model: Transformer, config: EngineConfig, max_model_len: int, fingerprint: str) -> None:
        shape, self.model = model.config, model
        self.shape = shape
        canvases = max(2, config.max_num_seqs)  # a guided request must be able to run alone
        size = _page_size(config.page_size, shape)
        room = _share_out(model, config, canvases, max_model_len + size)
        self.store_budget, self.pass_rows, self._spare = room.store, room.rows, room.spare
        # A lease splits a canvas in two, so a canvas may end one page later than its length says.
        self._pages = canvases + -(-(canvases * max_model_len + self.store_budget) // size)
        self._config, self._size = config, size
        self._salt = f"{fingerprint}:{model.dtype}".encode()
        self.recent = RecentPrompts(useful=config.prefix_min)
        self.pool = model.ranks.everywhere(_new_pool, model, self._pages, size)
        self._begin()

    def _begin(self) -> None:
        config = self._config
        self.allocator = PageAllocator(self.shape.layers, self._pages, self._size)
        self.extra_bytes = 0  # of running requests, beside their pages
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
        pieces = config.max_row_layers is not None
        self.audits = Audits(self.allocator, self.store, self.shape.layers, pieces=pieces)

    def reset(self) -> None:
        """Forget every page, every stored prefix and every request. Raises what the device raises if it is lost.

        The pool's tensors and the counters of the stores are kept.
        """
        store, chain = self.store.stats, self.chain.stats
        self._begin()
        self.store.stats, self.chain.stats = store, chain
        self.model.ranks.everywhere(_check_device, self.model)

    def check_kept(self, policy: CachePolicy) -> None:
        """Raise `ConfigError` where the device has no room for what `policy` keeps beside K and V."""
        if self._spare is None or "outputs" not in policy.traits.keeps or self.pool.outputs:
            return
        config, item = self.shape, self.model.dtype.itemsize
        token = 2 * config.layers * config.hidden * item
        needed = (self._pages * self._size + 1) * token
        if needed <= self._spare:
            return
        stored = token_bytes(config, item, self.model.ranks.shard.size)
        less = -(-(needed - self._spare) // (stored.kv + stored.state + token))
        fitting = self.store_budget - less - self._size  # as pages are whole
        way = f"--store-budget-tokens {fitting}, " if fitting >= 0 else ""
        raise ConfigError(
            f"this cache policy keeps outputs of attention and feed-forward of all layers, {gigabytes(needed)} for "
            f"{self._pages * self._size} tokens of K/V, and {gigabytes(max(0, self._spare))} are left; use {way}"
            "a lower --max-num-seqs or --max-model-len, or another policy"
        )

    def new_states(self, tokens: int) -> Tensor:
        """Room for the hidden states of so many positions, [layers - 1, tokens, D]."""
        return self.model.ranks.everywhere(_new_states, self.model, tokens)

    @property
    def bytes_used(self) -> int:
        """Bytes of the pages in use and of the hidden states held, weights not counted."""
        page = self.allocator.page_size * self.pool.bytes_per_token
        return self.allocator.used * page + self.store.state_bytes + self.extra_bytes + self.audits.extra_bytes

    def page_keys(self, request: Request, block: int) -> tuple[int, ...]:
        """Identities of the exact pages that a prompt fills, in blocks of `block` tokens. Any thread may ask for them.

        Empty where the policy shares no pages, or where a page holds no whole number of blocks.
        """
        if request.policy.traits.sharing != "pages" or self.chain.page_size % block:
            return ()
        return tuple(self.chain.identities(_whole_blocks(request, block), _page_salt(request, block)))

    def remember(self, pending: PendingRequest) -> None:
        """Note the prompt of a request whose shared prefix is to be found, and what it has in common with others."""
        request, policy = pending.request, pending.request.policy
        if self._config.prefix_sharing != "auto" or not request.find_prefix or policy.traits.sharing != "prefix":
            return
        prompt, most = request.prompt_token_ids, self._longest_shared(pending)
        guess = request.prefix_length >= self._config.prefix_min
        if not guess and most > 0 and policy.boundary(most, pending.decoding.length, self.shape.layers):
            pending.common = min(self.recent.add(prompt, request.cache_salt), most)

    def plan(self, pending: PendingRequest) -> Decision:
        """Where a request would go now, or why it has to wait. Changes nothing."""
        if pending.request.policy.traits.sharing == "pages":
            return self._plan_pages(pending)
        return self._plan_lease(pending)

    def give_way(self, waiting: NoRoom) -> bool:
        """Evict one stored prefix or page that nobody reads, for a request that has no room; False where none can go.

        What the request would read itself stays.
        """
        return waiting.evictable and (self.store.give_way(waiting.entries) or self.chain.give_way(waiting.pages))

    def place(self, pending: PendingRequest, placement: Placement) -> RunningRequest:
        """Give a request its canvases, pages and lease, as `plan` decided since the memory last changed.

        Where anything raises, nothing is left claimed.
        """
        with ExitStack() as undo:
            running = self._place(pending, placement, undo)
            undo.pop_all()
        if placement.refused:
            self.store.stats.refused += 1
            log.warning("request %s: %s", pending.request.id, placement.note)
        self.extra_bytes += sum(state.extra_bytes for state in running.branches)
        self.audits.count(placement.audit)
        return running

    def _place(self, pending: PendingRequest, placement: Placement, undo: ExitStack) -> RunningRequest:
        """As `place`; `undo` gets what gives back each thing that is claimed."""
        request, traits = pending.request, placement.policy.traits
        canvas = pending.decoding.canvas()
        if "outputs" in traits.keeps:
            self.pool.keep_outputs()
        owned = [extent for canvas in placement.own for extent in canvas]
        for extent in owned:
            self.allocator.claim(extent)
            undo.callback(self.allocator.release, extent)
        leases: tuple[Lease, ...] = ()
        prefix = None
        if placement.lease is not None:
            leases, prefix = self._leases(pending, placement.lease, undo), placement.lease.prefix
            self.store.stats.found += pending.common is not None and placement.lease.asked > request.prefix_length
        pages: tuple[Page, ...] = ()
        if placement.pages is not None:
            pages = self._read(placement.pages, len(pending.page_keys))
            prefix = PrefixHit(len(pages) * self.chain.page_size, self.shape.layers) if pages else None
        for page in pages:
            undo.callback(self.allocator.release, page.extent)
        front = leases[0] if leases and prefix is not None and prefix.lead else None
        first = self._state(canvas, _tables(front, pages, placement.own[0]), traits, prefix, leases, pages)
        states = [first]
        if pending.canvases == 2:
            # Only the conditional canvas begins with the shared prefix: the other one's prompt is masked.
            other = _unconditional(canvas, self.shape.mask_id, request.template)
            states.append(self._state(other, (plain_table(placement.own[1][0]),), traits))
        usage = Usage(prompt_tokens=pending.given_tokens, prefix_note=placement.note)
        if prefix is not None:
            usage.prefix_depth, usage.prefix_tokens = prefix.boundary, prefix.length
            found = [len(lease.entry) for lease in leases if lease.hit]
            usage.cached_tokens = sum(found) if leases else prefix.length
        sharing = None
        if placement.pages is not None and placement.pages.publishes:
            own, block = placement.own[0][0].single(), pending.decoding.block
            keys = list(pending.page_keys)
            sharing = PageSharing(self.chain, canvas, block, placement.pages.salt, list(pages), own, keys)
            undo.callback(sharing.release)
        owned += [page.extent for page in pages]
        running = RunningRequest(
            pending, placement.policy, self.shape.layers, tuple(states), owned, usage, leases, sharing
        )
        running.moves += _moves(first, leases)
        return running

    def _leases(self, pending: PendingRequest, plan: LeasePlan, undo: ExitStack) -> tuple[Lease, ...]:
        """The leases that were planned, in the order of the parts; `undo` gets what gives each of them back."""
        made: dict[int, Lease] = {}
        # What is there is leased first, so that none of it is evicted for what is not.
        for number in sorted(range(len(plan.parts)), key=lambda number: plan.parts[number].entry is None):
            made[number] = self._lease(pending, plan.parts[number], plan.prefix.layers)
            undo.callback(self._unlease, made[number])
        return tuple(made[number] for number in range(len(plan.parts)))

    def _unlease(self, lease: Lease) -> None:
        """Give a new lease back, and the entry too that was made for it."""
        self.store.release(lease)
        if not lease.hit and not lease.entry.leases:
            self.store.withdraw(lease.entry)

    def free(self, running: RunningRequest) -> None:
        """Take back all that a request owns and leases. Freeing it twice changes nothing."""
        for extent in running.owned:
            self.allocator.release(extent)
        running.owned.clear()
        for branch in running.branches:
            self.extra_bytes -= branch.extra_bytes
            branch.states = branch.tracker = None
        for lease in running.leases:
            self.store.release(lease)
        running.leases = ()
        if running.sharing is not None:
            running.sharing.release()
            running.sharing = None

    def forget_inputs(self, running: RunningRequest) -> None:
        """Let go of the hidden states of a request that are not needed any more."""
        for branch in running.branches:
            self.extra_bytes -= branch.extra_bytes
            branch.states = None

    def check(self, requests: Iterable[RunningRequest]) -> None:
        """Raise `IntegrityError` unless `requests` and the store own the pages that are in use, each exactly once."""
        expected = np.zeros_like(self.allocator.references)
        leases: dict[int, int] = {}
        owned = [entry.extent for entry in self.store.entries] + [page.extent for page in self.chain.pages]
        holders: list[RunningRequest | AuditPass] = [*requests, *self.audits.passes]
        for holder in holders:
            owned += holder.owned
            for lease in holder.leases:
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

    def _plan_lease(self, pending: PendingRequest) -> Decision:
        """A place with leases of what is shared, where it is asked for and the store can hold it."""
        policy, length, layers = pending.request.policy, pending.decoding.length, self.shape.layers
        wish = self._plan_parts(pending) if pending.request.segments else self._plan_prefix(pending)
        if wish.unknown is not None:
            return self.audits.plan(pending, wish.unknown)
        lease = wish.lease
        entries = () if lease is None else lease.entries
        # Of what is not read in place the canvas has a copy of its own, so one extent serves all layers.
        shared = 0 if lease is None else lease.prefix.lead
        leased = lease.prefix.layers if lease is not None and shared else 0
        parts = [(length - shared, range(leased)), (length, range(leased, layers))]
        # A lease of all layers leaves nothing for the layers above, and none leaves nothing for those below.
        wanted = [(tokens, part) for tokens, part in parts if len(part)]
        others = [(length, range(layers))] * (pending.canvases - 1)
        found = self.allocator.find([*wanted, *others])
        if found is None:
            return NoRoom(entries)
        missing = {} if lease is None else _missing(pending.request, lease)
        if missing and not self.store.has_room(list(missing), pending.request.cache_salt, found, entries):
            return NoRoom(evictable=False)
        own = (found[: len(wanted)], *((extent,) for extent in found[len(wanted) :]))
        audit = self.audits.beside(pending, wish.audit, [*wanted, *others])
        chosen = policy if lease else policy.without_prefix
        return Placement(chosen, own, lease, note=wish.note, refused=wish.refused, audit=audit)

    def _plan_prefix(self, pending: PendingRequest) -> "_Wish":
        """What a request would lease as things stand."""
        request, policy, shape, canvas = pending.request, pending.request.policy, self.shape, pending.decoding.length
        if self._config.prefix_sharing == "off":
            return _Wish(note="prefix_sharing is off" if request.prefix_length else None)
        prefix = self._shared(pending)
        boundary = policy.boundary(prefix, canvas, shape.layers) if prefix > 0 else 0
        if not boundary:
            return _Wish()
        entry = self.store.find(request.prompt_token_ids[:prefix], request.cache_salt)
        if entry is not None:
            wish = self._read_entry(policy, entry, prefix, canvas)
            if wish.lease is not None or wish.unknown is not None or len(entry) == prefix:
                return wish
        if not self.store.fits(prefix):
            note = f"prefix of {prefix} tokens exceeds the store's budget of {self.store.budget_tokens}"
            return _Wish(note=note, refused=True)
        if (audits := policy.traits.audits) is not None:
            return _Wish(unknown=AuditPlan(None, prefix, percent(prefix, canvas), audits))
        return _Wish(_prefix_plan(policy, prefix, boundary, shape.layers, prefix, None))

    def _plan_parts(self, pending: PendingRequest) -> "_Wish":
        """What a request would lease of the parts that it names, each of which is read whole or not at all."""
        request, policy, layers = pending.request, pending.request.policy, self.shape.layers
        if self._config.prefix_sharing == "off":
            return _Wish(note="prefix_sharing is off")
        prompt, most = request.prompt_token_ids, self._longest_shared(pending)
        named = [part for part in stored_parts(request.segments, len(prompt)) if part.start < most]
        parts = self._fitting(pending, [range(part.start, min(part.stop, most)) for part in named])
        tokens = sum(map(len, parts))
        note = None
        if left := len(named) - len(parts):
            note = f"{left} of {len(named)} parts are not read: the store's budget is {self.store_budget} tokens"
        boundary = policy.boundary(tokens, pending.decoding.length, layers) if tokens else 0
        if not boundary:
            return _Wish(note=note, refused=note is not None)
        found = [self.store.whole(prompt[part.start : part.stop], request.cache_salt) for part in parts]
        leased = policy.leased_layers(boundary, layers)
        hit = PrefixHit(tokens, boundary, leased, tuple(parts), policy.traits.copies)
        return _Wish(LeasePlan(hit, tuple(map(PartPlan, parts, found))), note=note, refused=note is not None)

    def _fitting(self, pending: PendingRequest, parts: Sequence[range]) -> list[range]:
        """Those of `parts` that the store can hold together beside the canvas, the first ones first."""
        prompt, pages_for = pending.request.prompt_token_ids, self.allocator.pages_for
        tokens, pages = 0, pending.canvases * pages_for(pending.decoding.length)
        seen, fitting = set[tuple[int, ...]](), []
        for part in parts:
            content = tuple(prompt[part.start : part.stop])
            if content not in seen:
                if tokens + len(part) >= self.store_budget or pages + pages_for(len(part)) > self._pages:
                    continue
                seen.add(content)
                tokens, pages = tokens + len(part), pages + pages_for(len(part))
            fitting.append(part)
        return fitting

    def _longest_shared(self, pending: PendingRequest) -> int:
        """The rows that predict the response must be live, so a prefix may not reach into them."""
        return len(pending.request.prompt_token_ids) - self.shape.shift

    def _shared(self, pending: PendingRequest) -> int:
        """Leading tokens that a request shares: those that it names, or those that were found."""
        request, config, most = pending.request, self._config, self._longest_shared(pending)
        if pending.common is not None:
            level = self.store.level(request.prompt_token_ids[: max(0, most)], request.cache_salt)
            if level is not None and len(level) >= max(config.prefix_min, config.prefix_cover * pending.common):
                return len(level)
            if pending.common >= config.prefix_min:
                return pending.common
        return min(request.prefix_length, most)

    def _read_entry(self, policy: CachePolicy, entry: PrefixEntry, asked: int, canvas: int) -> "_Wish":
        """What a request under `policy` that asked for `asked` tokens would lease of `entry`."""
        # The boundary depends on the length that is read, not on the length that was asked for.
        length, audits, audit, note = len(entry), policy.traits.audits, None, None
        boundary = policy.boundary(length, canvas, self.shape.layers)
        if audits is not None:
            audit = AuditPlan(entry, asked, percent(length, canvas), audits)
            depth = entry.depths.depth(audit.ratio, audits.tau)
            if depth is None:
                return _Wish(unknown=audit)
            boundary = min(boundary, depth)
            note = None if boundary else f"audits of this prefix allow no layer a similarity above tau={audits.tau:g}"
        lease = _prefix_plan(policy, length, boundary, self.shape.layers, asked, entry) if boundary else None
        return _Wish(lease, audit, note=note)

    def _plan_pages(self, pending: PendingRequest) -> Decision:
        """A place that begins with stored pages. A request awaits the next page that it needs, if one computes it."""
        request, block, size = pending.request, pending.decoding.block, self.chain.page_size
        if self.chain.awaited(pending.page_keys):
            return Awaiting.PAGE
        salt = _page_salt(request, block)
        pages = tuple(self.chain.find(_whole_blocks(request, block), pending.page_keys, salt))
        own = self.allocator.find([(pending.decoding.length - len(pages) * size, range(self.shape.layers))])
        if own is None:
            return NoRoom(pages=frozenset(page.key for page in pages))
        note = None
        if size % block:
            note = f"pages of {size} tokens hold no whole number of blocks of {block}: none is shared"
        publishes = note is None and self.chain.budget_tokens >= size
        return Placement(request.policy.without_prefix, (own,), pages=PagePlan(pages, salt, publishes), note=note)

    def _lease(self, pending: PendingRequest, plan: PartPlan, layers: int) -> Lease:
        """The lease that was planned. Raises `IntegrityError` where the store has changed since then."""
        request, entry = pending.request, plan.entry
        tokens = request.prompt_token_ids[plan.asked.start : plan.asked.stop]
        if entry is None:
            entry = self.store.whole(tokens, request.cache_salt)  # of an equal part before it
        if entry is None:
            return self._reserved(tokens, layers, request.cache_salt)
        if entry.key == pending.brought:
            return self.store.hold(entry, layers)
        return self.store.lend(entry, layers, tokens)

    def _reserved(self, tokens: Sequence[int], layers: int, cache_salt: str) -> Lease:
        """The lease of a new entry. Raises `IntegrityError` where the store has changed since it was planned."""
        lease = self.store.reserve(tokens, layers, cache_salt)
        if lease is None:
            raise IntegrityError("the room that was planned for a new entry is gone")
        return lease

    def _read(self, plan: PagePlan, asked: int) -> tuple[Page, ...]:
        """The stored pages that were planned, each with a reference for the request that reads them."""
        for page in plan.found:
            self.allocator.retain(page.extent)
        self.chain.found(plan.found, asked)
        return plan.found

    def _state(
        self,
        canvas: Canvas,
        tables: tuple[SlotTable, ...],
        traits: Traits,
        prefix: PrefixHit | None = None,
        leases: Sequence[Lease] = (),
        pages: Sequence[Page] = (),
    ) -> CanvasState:
        shape = self.shape
        watched = "attention" in traits.keeps
        asks = "inputs" in traits.keeps and prefix is not None
        states = self.new_states(len(canvas)) if watched or asks else None
        restored = [] if states is None else [Kept(0, states)]
        if leases and prefix is not None:
            restored = [Kept(p.start, each.entry.states) for p, each in zip(prefix.parts, leases, strict=True)]
        return CanvasState(
            canvas=canvas,
            ledger=Ledger(shape.layers, len(canvas), prefix),
            tables=tables,
            prefix=prefix,
            lease=leases[0] if leases and prefix is not None and prefix.lead else None,
            restored=tuple(restored),
            states=states,
            shift=shape.shift,
            outputs="outputs" in traits.keeps,
            chain=pages[-1].key if pages else 0,
            tracker=Tracker() if watched else None,
        )


@dataclass(frozen=True, slots=True)
class _Room:
    """What is decided of an engine's memory when it is made.

    Attributes:
        store: tokens that the prefix store may hold.
        rows: most rows of a pass in any layer; None: any number, as memory is taken as it is needed.
        spare: bytes that nothing is planned for; None: unknown.
    """

    store: int
    rows: int | None = None
    spare: int | None = None


def _share_out(model: Transformer, config: EngineConfig, canvases: int, longest: int) -> _Room:
    """Divide the memory of `model`'s device. Raises `ConfigError` where canvases of `longest` tokens do not fit."""
    asked, device = config.store_budget_tokens, model.device
    if device.type != "cuda":
        if config.gpu_memory_utilization is not None:
            raise ConfigError(
                f"gpu_memory_utilization={config.gpu_memory_utilization:g} is for CUDA devices, and the model is on "
                f"{device}: leave it out, as K/V take memory there page by page"
            )
        return _Room(DEFAULT_STORE_TOKENS if asked == "auto" else asked)
    free, total = model.ranks.everywhere(_device_memory, model)
    memory = DeviceMemory(total, free, config.gpu_memory_utilization or DEFAULT_UTILIZATION)
    ranks, shape, item = model.ranks.shard.size, model.config, model.dtype.itemsize
    token, stored = token_bytes(shape, item, ranks), 0 if asked == "auto" else asked
    extra = 0
    if config.graphs:  # which have memory of their own for a pass
        extra = workspace_bytes(shape, MOST_ROWS, longest, item, ranks, model.attention) + graph_bytes(shape, item)
        extra += attention_bytes(shape, MOST_ROWS, longest, item, model.attention, filled=True)
    left = memory.room - extra - canvases * longest * token.kv - stored * (token.kv + token.state)
    most = canvases * longest
    if config.max_row_layers is not None:  # a row has a layer at least
        most = min(most, config.max_row_layers)
    rows = pass_rows(shape, most, longest, item, left, ranks, model.attention)
    workspace = extra + workspace_bytes(shape, rows, longest, item, ranks, model.attention)
    room = store_tokens(memory, token, workspace, canvases, longest)
    if stored > room:
        raise ConfigError(
            f"store_budget_tokens={asked} needs {gigabytes(stored * (token.kv + token.state))} beside running "
            f"canvases, and there is room for {room} tokens; everything may take {memory}. Use {room}, 'auto', or "
            "a lower max_num_seqs or max_model_len"
        )
    if rows < most:
        log.info("passes have at most %d rows, as %s are left for them", rows, gigabytes(left))
    store = room if asked == "auto" else stored
    taken = canvases * longest * token.kv + store * (token.kv + token.state)
    return _Room(store, rows, memory.room - workspace - taken)


def _device_memory(model: Transformer) -> tuple[int, int]:
    """Bytes that are free, and those that there are, on the device of the rank that has the fewest."""
    found = torch.tensor(torch.cuda.mem_get_info(model.device), device=model.device)
    free, total = model.ranks.gather(found).amin(dim=0).tolist()
    return free, total


def _new_pool(model: Transformer, pages: int, page_size: int) -> Pool:
    """K/V memory for the heads of one rank."""
    return Pool(model.part, pages, page_size, model.dtype, model.device)


def _new_states(model: Transformer, tokens: int) -> Tensor:
    """Room for the hidden states of `tokens` positions, [layers - 1, tokens, D], on one rank."""
    return new_states(model.config.layers, model.config.hidden, model.dtype, model.device, tokens)


def _check_device(model: Transformer) -> None:
    """Raise what the device raises where it is lost: an error that it cannot recover from comes with its next use."""
    torch.ones(1, device=model.device).item()


def _tables(lease: Lease | None, pages: Sequence[Page], own: Sequence[PageRange]) -> tuple[SlotTable, ...]:
    """The slots of a canvas that begins with a leased prefix, with stored pages, or with neither."""
    if lease is not None:
        return leased_tables(lease, own)
    return (shared_table([page.extent for page in pages], own[0]) if pages else plain_table(own[0]),)


def _prefix_plan(
    policy: CachePolicy, length: int, boundary: int, layers: int, asked: int, entry: PrefixEntry | None
) -> LeasePlan:
    """A lease of a prefix of `length` of the `asked` tokens as `policy` asks for it, on a model of `layers`."""
    hit = PrefixHit(length, boundary, policy.leased_layers(boundary, layers), copied=policy.traits.copies)
    return LeasePlan(hit, (PartPlan(range(asked), entry),))


def _missing(request: Request, plan: LeasePlan) -> dict[tuple[int, ...], None]:
    """What has to be stored for a lease, each once."""
    missing = [part.asked for part in plan.parts if part.entry is None]
    return dict.fromkeys(tuple(request.prompt_token_ids[part.start : part.stop]) for part in missing)


def _moves(branch: CanvasState, leases: Sequence[Lease]) -> list[Move]:
    """What is copied for a canvas before its first pass: parts that do not stand where they were computed."""
    hit = branch.prefix
    if hit is None or not leases:
        return []
    slots = branch.slots(0)
    return [
        Move(lease.entry.extent.slots(), slots[part.start : part.stop], hit.layers, part.start)
        for part, lease in zip(hit.parts, leases, strict=True)
        if part.start or hit.copied
    ]


def _whole_blocks(request: Request, block: int) -> Sequence[int]:
    """The leading tokens of a prompt that make whole blocks."""
    tokens = request.prompt_token_ids
    return tokens[: len(tokens) // block * block]


def _page_salt(request: Request, block: int) -> str:
    """What separates the exact pages of different block lengths and tenants."""
    return f"{block}:{request.cache_salt}"


def _unconditional(canvas: Canvas, mask_id: int, template: Template | None) -> Canvas:
    """The other branch of a guided pair: the same canvas with every prompt position masked (LLaDA's guidance).

    Fixed parts of the response stand there too, as generated tokens do.
    """
    return Canvas.masked([mask_id] * canvas.prompt, len(canvas) - canvas.prompt, mask_id, template)


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
