"""The ways of sharing K/V between requests: leases of stored prefixes, and exact pages.

Where K/V depend only on earlier tokens, equal leading tokens have equal pages.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from remask.engine.config import EngineConfig
from remask.engine.placement import (
    AwaitsPage,
    Decision,
    LeasePlan,
    NoRoom,
    PagePlan,
    PageSharing,
    Placement,
    Shared,
)
from remask.engine.request import PendingRequest, Request
from remask.errors import IntegrityError
from remask.model.config import ModelConfig
from remask.plan.canvas import Canvas
from remask.plan.plan import PrefixHit
from remask.policies.base import CachePolicy, Unread
from remask.policies.bicache import BiCache, Earned
from remask.policies.earned import EarnedDepths
from remask.sampling.decoder import Decoding
from remask.store.chain import PageChain
from remask.store.entries import PrefixEntry
from remask.store.prefix import Lease, PrefixStore
from remask.store.recent import RecentPrompts

OFF = Unread("off", "prefix_sharing is off")


class Sharing(Protocol):
    """One way of sharing K/V between requests."""

    def plan(self, pending: PendingRequest) -> Decision:
        """The place of a request, with the K/V that it would share, or why it has to wait. Changes nothing."""
        ...

    def claim(self, pending: PendingRequest, placement: Placement, canvas: Canvas, undo: ExitStack) -> Shared:
        """Claim what `plan` decided, which must be recent. `undo` gets a call that frees each thing claimed."""
        ...


@dataclass(frozen=True, slots=True)
class Wish:
    """The lease that a request would get."""

    lease: LeasePlan | None = None  # the lease; None: none
    unread: Unread | None = None  # why it leases nothing
    kept: int = 0  # the leading tokens that it shares, if its policy reads none of them from the store


class Prefixes(Sharing):
    """A `Sharing` of whole entries of the store: prefixes that requests name, or that recent prompts have in common."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        store: PrefixStore,
        recent: RecentPrompts,
        depths: EarnedDepths | None = None,
    ) -> None:
        """`recent` are the prompts of late, and `depths` those that audits have earned; None: they earn none."""
        self.config, self.shape, self.store, self.recent, self.depths = config, shape, store, recent, depths
        self.allocator = store.allocator

    def plan(self, pending: PendingRequest) -> Decision:
        length, layers = pending.decoding.length, self.shape.layers
        wish = self.wish(pending)
        lease = wish.lease
        entry = None if lease is None else lease.entry
        # A prefix that is not read in place is copied to pages of the canvas, so one extent serves all layers.
        shared = 0 if lease is None else lease.prefix.lead
        leased = lease.prefix.layers if lease is not None and shared else 0
        parts = [(length - shared, range(leased)), (length, range(leased, layers))]
        # A lease of all layers leaves nothing for the layers above, and none leaves nothing for those below.
        wanted = [(tokens, part) for tokens, part in parts if len(part)]
        others = [(length, range(layers))] * (pending.canvases - 1)
        extents = self.allocator.find([*wanted, *others])
        if extents is None:
            return NoRoom(entry)
        if lease is not None and entry is None:
            tokens = pending.request.prompt_token_ids[: lease.asked]
            if not self.store.has_room(tokens, pending.request.salt, extents):
                return NoRoom(evictable=False)
        pages = (extents[: len(wanted)], *((extent,) for extent in extents[len(wanted) :]))
        if lease is not None:
            return Placement(self.policy(pending, lease.prefix.length), pages, lease, unread=wish.unread)
        return Placement(self.policy(pending, wish.kept).within(wish.kept), pages, unread=wish.unread, kept=wish.kept)

    def claim(
        self,
        pending: PendingRequest,
        placement: Placement,
        canvas: Canvas,  # noqa: ARG002
        undo: ExitStack,
    ) -> Shared:
        plan = placement.lease
        if plan is None:
            return Shared()
        lease = self._lease(pending, plan)
        undo.callback(self._unlease, lease)
        self.store.stats.unnamed += pending.common is not None and plan.asked > pending.request.prefix_length
        return Shared(plan.prefix, lease)

    def longest(self, pending: PendingRequest) -> int:
        """The rows that predict the response must be live, so what is shared may not reach into them."""
        return len(pending.request.prompt_token_ids) - self.shape.shift

    def _lease(self, pending: PendingRequest, plan: LeasePlan) -> Lease:
        """Take a planned lease. Raises `IntegrityError` where the store has changed since."""
        request, layers = pending.request, plan.prefix.layers
        tokens = request.prompt_token_ids[: plan.asked]
        if plan.entry is not None:
            return self.store.lend(plan.entry, layers, tokens)
        lease = self.store.reserve(tokens, layers, request.salt)
        if lease is None:
            raise IntegrityError("the room that was planned for a new entry is gone")
        return lease

    def _unlease(self, lease: Lease) -> None:
        """Remove the entry that was made for the lease, too."""
        self.store.release(lease)
        if not lease.hit and not lease.entry.leases:
            self.store.withdraw(lease.entry)

    def remember(self, pending: PendingRequest) -> None:
        """Note the prompt of a request whose shared prefix is to be found, and what it has in common with others."""
        request, policy = pending.request, pending.request.policy
        if self.config.prefix_sharing != "auto" or not request.find_prefix or policy.traits.sharing != "prefix":
            return
        prompt, most = request.prompt_token_ids, self.longest(pending)
        guess = request.prefix_length >= self.config.prefix_min
        if not guess and most > 0 and policy.boundary(most, pending.decoding.length, self.shape.layers):
            pending.common = min(self.recent.add(prompt, request.salt), most)

    def wish(self, pending: PendingRequest) -> Wish:
        """The lease that a request would get now."""
        request, shape, canvas = pending.request, self.shape, pending.decoding.length
        prefix = self._asked(pending)
        if prefix <= 0:
            return Wish(unread=self._nothing(pending))
        if self.config.prefix_sharing == "off":
            return Wish(unread=OFF)
        policy = self.policy(pending, prefix)
        boundary = policy.boundary(prefix, canvas, shape.layers)
        if not boundary:
            return Wish(unread=request.policy.unread(prefix, canvas), kept=prefix)
        entry = self.store.find(request.prompt_token_ids[:prefix], request.salt)
        if entry is not None:
            wish = self._read(pending, entry, prefix)
            if wish.lease is not None or len(entry) == prefix:
                return wish
        if not self.store.fits(prefix):
            note = f"prefix of {prefix} tokens exceeds the store's budget of {self.store.budget_tokens}"
            return Wish(unread=Unread("budget", note))
        return Wish(_lease(policy, prefix, boundary, shape.layers, prefix, None), no_entry(request.cache_salt))

    def _nothing(self, pending: PendingRequest) -> Unread | None:
        """Why nothing of a prompt is shared. None where that is asked for, or the policy would read nothing anyway."""
        request, prompt = pending.request, len(pending.request.prompt_token_ids)
        if request.prefix_length:
            return Unread("short", "the one token of the prefix predicts the response, so it is computed")
        if not request.find_prefix or not request.policy.boundary(prompt, pending.decoding.length, self.shape.layers):
            return None
        if pending.common is not None:
            return Unread("nothing", f"no recent prompt begins with {self.config.prefix_min} tokens of this one")
        return Unread(
            "nothing",
            "nothing is shared: no turn stands before the last user turn, and no prefix_length or cache_control says "
            "what other prompts begin with too",
        )

    def _asked(self, pending: PendingRequest) -> int:
        """Leading tokens that a request shares: those that it names, or those that were found."""
        request, config, most = pending.request, self.config, self.longest(pending)
        if pending.common is not None:
            level = self.store.longest_level(request.prompt_token_ids[: max(0, most)], request.salt)
            if level is not None and len(level) >= max(config.prefix_min, config.prefix_cover * pending.common):
                return len(level)
            if pending.common >= config.prefix_min:
                return pending.common
        return min(request.prefix_length, most)

    def policy(self, pending: PendingRequest, prefix: int) -> CachePolicy:
        """The policy of a request that shares `prefix` tokens, with the depth that audits have earned."""
        request, canvas = pending.request, pending.decoding.length
        policy = request.policy
        if not isinstance(policy, BiCache) or not isinstance(policy.depth, Earned):
            return policy
        depth = policy.depth.begin(prefix, canvas)
        if self.depths is not None and prefix:
            record = self.depths.record(request.adapter or "", prefix, canvas)
            depth = record.depth(self.store.key(request.prompt_token_ids[:prefix], request.salt), depth)
        return policy.at(min(depth, self.shape.layers))

    def _read(self, pending: PendingRequest, entry: PrefixEntry, length_asked: int) -> Wish:
        # The boundary depends on the length that is read, not on the length that was asked for.
        length, canvas = len(entry), pending.decoding.length
        policy = self.policy(pending, length)
        boundary = policy.boundary(length, canvas, self.shape.layers)
        if not boundary:
            return Wish(unread=pending.request.policy.unread(length, canvas), kept=length_asked)
        return Wish(_lease(policy, length, boundary, self.shape.layers, length_asked, entry))


def _lease(
    policy: CachePolicy, length: int, boundary: int, layers: int, asked: int, entry: PrefixEntry | None
) -> LeasePlan:
    """A lease of a prefix of `length` of the `asked` tokens, on a model of `layers`."""
    hit = PrefixHit(length, boundary, policy.leased_layers(boundary, layers), copied=policy.traits.copies)
    return LeasePlan(hit, asked, entry)


def no_entry(cache_salt: str) -> Unread | None:
    """Why a request reads nothing although its prefix will be stored: None where the prefix is merely new.

    Whether it is stored under another salt is told to nobody.
    """
    return Unread("salt", "nothing of this cache_salt is stored yet, and no other is read") if cache_salt else None


class Pages(Sharing):
    """Exact pages, on a model of `layers`. A request awaits the next page that it needs, if another one computes it."""

    def __init__(self, chain: PageChain, layers: int) -> None:
        self.chain, self.allocator, self.layers = chain, chain.allocator, layers

    def keys(self, request: Request, decoding: Decoding) -> tuple[int, ...]:
        """Identities of the pages that a prompt fills in the blocks of `decoding`; empty: none. Any thread may ask."""
        if request.policy.traits.sharing != "pages" or self.chain.page_size % decoding.block:
            return ()
        tokens, salt = _whole_blocks(request, decoding), _salt(request, decoding.block, decoding.ahead)
        return tuple(self.chain.identities(tokens, salt, decoding.ahead))

    def plan(self, pending: PendingRequest) -> Decision:
        request, decoding, size = pending.request, pending.decoding, self.chain.page_size
        block, ahead = decoding.block, decoding.ahead
        if self.chain.is_next_pending(pending.page_keys):
            return AwaitsPage()
        salt = _salt(request, block, ahead)
        pages = tuple(self.chain.find(_whole_blocks(request, decoding), pending.page_keys, salt, ahead))
        extents = self.allocator.find([(decoding.length - len(pages) * size, range(self.layers))])
        if extents is None:
            return NoRoom(pages=frozenset(page.key for page in pages))
        unread, budget = None, self.chain.budget_tokens
        if size % block:
            unread = Unread(
                "pages", f"pages of {size} tokens hold no whole number of blocks of {block}: none is shared"
            )
        elif budget < size:
            unread = Unread("budget", f"the store's budget of {budget} tokens holds no page of {size}")
        elif not pending.page_keys:
            prompt = len(request.prompt_token_ids)
            unread = Unread("short", f"the prompt of {prompt} tokens fills no page of {size}")
        elif not pages:
            unread = self._elsewhere(request, decoding) or no_entry(request.cache_salt)
        publishes = not size % block and budget >= size
        return Placement(
            request.policy.without_prefix, (extents,), pages=PagePlan(pages, salt, publishes), unread=unread
        )

    def _elsewhere(self, request: Request, decoding: Decoding) -> Unread | None:
        """Why a stored beginning of the prompt is not read: the blocks of its pages end at other tokens of it."""
        tokens, block = request.prompt_token_ids, decoding.block
        for ahead in range(block) if decoding.from_prompt else ():
            salt = _salt(request, block, ahead)
            key = self.chain.identity(tokens[self.chain.token_slice(0, ahead)], None, salt)
            if self.chain.find(tokens, [key], salt, ahead):
                return Unread(
                    "blocks",
                    f"blocks of {block} are counted from the end of the prompt, whose {len(tokens)} tokens leave "
                    f"{decoding.ahead}; the page stored of its beginning is of prompts that leave {ahead}",
                )
        return None

    def claim(self, pending: PendingRequest, placement: Placement, canvas: Canvas, undo: ExitStack) -> Shared:
        plan = placement.pages
        assert plan is not None
        for page in plan.found:
            self.allocator.retain(page.extent)
            undo.callback(self.allocator.release, page.extent)
        self.chain.record_lookup(plan.found, len(pending.page_keys))
        prefix = PrefixHit(len(plan.found) * self.chain.page_size, self.layers) if plan.found else None
        if not plan.publishes:
            return Shared(prefix, pages=plan.found)
        extents, keys = placement.own[0][0].split(), list(pending.page_keys)
        grid = pending.decoding.block, pending.decoding.ahead
        publishes = PageSharing(self.chain, canvas, *grid, plan.salt, list(plan.found), extents, keys)
        undo.callback(publishes.release)
        return Shared(prefix, pages=plan.found, publishes=publishes)


def _whole_blocks(request: Request, decoding: Decoding) -> Sequence[int]:
    tokens = request.prompt_token_ids
    return tokens[: len(tokens) - (len(tokens) - decoding.ahead) % decoding.block]


def _salt(request: Request, block: int, ahead: int) -> str:
    """The salt of a request's page hashes: pages of other grids of blocks, adapters and tenants never match."""
    return f"{block}+{ahead}:{request.salt}"
