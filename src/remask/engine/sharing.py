"""The ways of sharing K/V between requests: leases of stored prefixes, and exact pages.

Where K/V depend only on earlier tokens, equal leading tokens have equal pages.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from remask.engine.config import EngineConfig
from remask.engine.placement import AwaitsPage, Decision, LeasePlan, NoRoom, PagePlan, PageSharing, Placement, SharedKV
from remask.engine.request import PendingRequest, Request
from remask.errors import IntegrityError
from remask.model.config import ModelConfig
from remask.plan.canvas import Canvas
from remask.plan.plan import PrefixHit
from remask.policies.base import CachePolicy, UnreadReason
from remask.policies.bicache import BiCache, Earned
from remask.policies.earned import EarnedDepths
from remask.sampling.decoder import Decoding
from remask.store.chain import PageChain
from remask.store.entries import PrefixEntry
from remask.store.prefix import Lease, PrefixStore
from remask.store.recent import RecentPrompts

SHARING_OFF = UnreadReason("off", "prefix_sharing is off")


class Sharing(Protocol):
    """One way of sharing K/V between requests."""

    def plan(self, pending: PendingRequest) -> Decision:
        """The place of a request, with the K/V that it would share, or why it has to wait. Changes nothing."""
        ...

    def claim(self, pending: PendingRequest, placement: Placement, canvas: Canvas, undo: ExitStack) -> SharedKV:
        """Claim the stored K/V of a placement from `plan`, which must still be valid.

        For each claim, the call that frees it is pushed to `undo`.
        """
        ...


@dataclass(frozen=True, slots=True)
class LeaseChoice:
    """The lease that a request would get, or why it gets none."""

    lease: LeasePlan | None = None
    unread_reason: UnreadReason | None = None  # why it reads no stored prefix
    unleased_prefix: int = 0  # leading tokens that it shares, if its policy reads none of them from the store


class Prefixes(Sharing):
    """A `Sharing` of whole entries of the store: prefixes that requests name, or that recent prompts have in common."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        store: PrefixStore,
        recent: RecentPrompts,
        depths: EarnedDepths | None = None,
    ) -> None:
        """`recent` are the last prompts, and `depths` those that audits have earned; None if they earn none."""
        self.config = config
        self.model_config = model_config
        self.store = store
        self.recent = recent
        self.depths = depths
        self.allocator = store.allocator

    def plan(self, pending: PendingRequest) -> Decision:
        """See `Sharing`. A prefix that is read in place saves pages in the leased layers; a copied one saves none."""
        length, layers = pending.decoding.length, self.model_config.layers
        choice = self.choose_lease(pending)
        lease = choice.lease
        entry = None if lease is None else lease.entry
        lead = 0 if lease is None else lease.prefix.lead
        leased_layers = lease.prefix.layers if lease is not None and lead else 0
        demands = [(length - lead, range(leased_layers)), (length, range(leased_layers, layers))]
        demands = [demand for demand in demands if len(demand[1])]  # all or no layers may be leased
        other_canvases = [(length, range(layers))] * (pending.canvas_count - 1)
        free_extents = self.allocator.find([*demands, *other_canvases])
        if free_extents is None:
            return NoRoom(entry)
        if lease is not None and entry is None:
            tokens = pending.request.prompt_token_ids[: lease.requested_tokens]
            if not self.store.has_room(tokens, pending.request.salt, free_extents):
                return NoRoom(evictable=False)
        extents = (free_extents[: len(demands)], *((extent,) for extent in free_extents[len(demands) :]))
        if lease is not None:
            policy = self.policy(pending, lease.prefix.length)
        else:
            policy = self.policy(pending, choice.unleased_prefix).within(choice.unleased_prefix)
        return Placement(
            policy, extents, lease, unread_reason=choice.unread_reason, unleased_prefix=choice.unleased_prefix
        )

    def claim(self, pending: PendingRequest, placement: Placement, canvas: Canvas, undo: ExitStack) -> SharedKV:  # noqa: ARG002
        """See `Sharing`. Counts leases of prefixes that no request has named. Raises `IntegrityError` without room."""
        plan = placement.lease
        if plan is None:
            return SharedKV()
        lease = self._take_lease(pending, plan)
        undo.callback(self._cancel_lease, lease)
        is_unnamed = pending.common_tokens is not None and plan.requested_tokens > pending.request.prefix_length
        self.store.stats.unnamed += is_unnamed
        return SharedKV(plan.prefix, lease)

    def max_prefix(self, pending: PendingRequest) -> int:
        """Largest number of tokens that a request can share, as the rows that predict the response are computed."""
        return len(pending.request.prompt_token_ids) - self.model_config.shift

    def _take_lease(self, pending: PendingRequest, plan: LeasePlan) -> Lease:
        """Lease the entry of `plan`, or a new one. Raises `IntegrityError` if the store has no room for it."""
        request, layers = pending.request, plan.prefix.layers
        tokens = request.prompt_token_ids[: plan.requested_tokens]
        if plan.entry is not None:
            return self.store.lend(plan.entry, layers, tokens)
        lease = self.store.reserve(tokens, layers, request.salt)
        if lease is None:
            raise IntegrityError("the room that was planned for a new entry is gone")
        return lease

    def _cancel_lease(self, lease: Lease) -> None:
        """Release the lease, and remove the entry if it was created for it."""
        self.store.release(lease)
        if not lease.hit and not lease.entry.leases:
            self.store.withdraw(lease.entry)

    def remember(self, pending: PendingRequest) -> None:
        """Add a prompt to the recent ones, and set `pending.common_tokens`, if the request leaves its prefix open."""
        request, policy = pending.request, pending.request.policy
        if self.config.prefix_sharing != "auto" or not request.find_prefix or policy.traits.sharing != "prefix":
            return
        if request.prefix_length >= self.config.prefix_min:  # the guess is long enough to be worth sharing
            return
        max_prefix = self.max_prefix(pending)
        if max_prefix > 0 and policy.boundary(max_prefix, pending.decoding.length, self.model_config.layers):
            pending.common_tokens = min(self.recent.add(request.prompt_token_ids, request.salt), max_prefix)

    def choose_lease(self, pending: PendingRequest) -> LeaseChoice:
        """Choose the lease of a request: of the entry that the store finds, or of a new one for all of the prefix.

        There is none if the policy does not read such a prefix, or the store cannot hold it. Changes nothing.
        """
        request = pending.request
        prefix_length = self._prefix_length(pending)
        if prefix_length <= 0:
            return LeaseChoice(unread_reason=self._no_prefix_reason(pending))
        if self.config.prefix_sharing == "off":
            return LeaseChoice(unread_reason=SHARING_OFF)
        new_entry_choice = self._lease_of(pending, prefix_length, requested_tokens=prefix_length, entry=None)
        if new_entry_choice.lease is None:
            return new_entry_choice
        entry = self.store.find(request.prompt_token_ids[:prefix_length], request.salt)
        if entry is not None:
            choice = self._lease_of(pending, len(entry), requested_tokens=prefix_length, entry=entry)
            if choice.lease is not None or len(entry) == prefix_length:
                return choice
        if not self.store.fits(prefix_length):
            note = f"prefix of {prefix_length} tokens exceeds the store's budget of {self.store.budget_tokens}"
            return LeaseChoice(unread_reason=UnreadReason("budget", note))
        return replace(new_entry_choice, unread_reason=no_entry_reason(request.cache_salt))

    def _no_prefix_reason(self, pending: PendingRequest) -> UnreadReason | None:
        """Why a request shares nothing; None if it asked for that, or if its policy would read nothing anyway."""
        request, canvas_length, layers = pending.request, pending.decoding.length, self.model_config.layers
        if request.prefix_length:
            return UnreadReason("short", "the one token of the prefix predicts the response, so it is computed")
        prompt_length = len(request.prompt_token_ids)
        if not request.find_prefix or not request.policy.boundary(prompt_length, canvas_length, layers):
            return None
        if pending.common_tokens is not None:
            return UnreadReason("nothing", f"no recent prompt begins with {self.config.prefix_min} tokens of this one")
        return UnreadReason(
            "nothing",
            "nothing is shared: no turn stands before the last user turn, and no prefix_length or cache_control says "
            "what other prompts begin with too",
        )

    def _prefix_length(self, pending: PendingRequest) -> int:
        """Number of leading tokens that a request shares, at most `max_prefix`; 0 or less if it shares none.

        If the request leaves its prefix open (`common_tokens`), the longest stored entry that its prompt begins with is
        shared if it has `prefix_min` tokens and covers the share `prefix_cover` of the common tokens. Otherwise the
        common tokens are shared if they are at least `prefix_min`. Else the request's `prefix_length` counts.
        """
        request, config = pending.request, self.config
        max_prefix = self.max_prefix(pending)
        common = pending.common_tokens
        if common is not None:
            entry = self.store.longest_entry(request.prompt_token_ids[: max(0, max_prefix)], request.salt)
            if entry is not None and len(entry) >= max(config.prefix_min, config.prefix_cover * common):
                return len(entry)
            if common >= config.prefix_min:
                return common
        return min(request.prefix_length, max_prefix)

    def policy(self, pending: PendingRequest, prefix_length: int) -> CachePolicy:
        """The policy of a request that shares `prefix_length` tokens, with the depth that audits have earned."""
        request, canvas_length = pending.request, pending.decoding.length
        policy = request.policy
        if not isinstance(policy, BiCache) or not isinstance(policy.depth, Earned):
            return policy
        depth = policy.depth.start_depth(prefix_length, canvas_length)
        if self.depths is not None and prefix_length:
            record = self.depths.record(request.adapter or "", prefix_length, canvas_length)
            depth = record.depth(self.store.key(request.prompt_token_ids[:prefix_length], request.salt), depth)
        return policy.with_depth(min(depth, self.model_config.layers))

    def _lease_of(
        self, pending: PendingRequest, length: int, *, requested_tokens: int, entry: PrefixEntry | None
    ) -> LeaseChoice:
        """The lease of `length` tokens, stored as `entry` or not stored yet, if `requested_tokens` are to be shared."""
        request, canvas_length, layers = pending.request, pending.decoding.length, self.model_config.layers
        policy = self.policy(pending, length)
        boundary = policy.boundary(length, canvas_length, layers)
        if not boundary:
            # `policy` has an earned depth as a number that nobody set, so the request's own policy gives the reason.
            reason = request.policy.unread_reason(length, canvas_length)
            return LeaseChoice(unread_reason=reason, unleased_prefix=requested_tokens)
        hit = PrefixHit(length, boundary, policy.leased_layers(boundary, layers), copied=policy.traits.copies)
        return LeaseChoice(LeasePlan(hit, requested_tokens, entry))


def no_entry_reason(cache_salt: str) -> UnreadReason | None:
    """Why a request reads nothing although its prefix will be stored; None without a salt, as the prefix is just new.

    The reason does not reveal whether the prefix is stored under another salt.
    """
    if not cache_salt:
        return None
    return UnreadReason("salt", "nothing of this cache_salt is stored yet, and no other is read")


class Pages(Sharing):
    """A `Sharing` of exact pages. A request waits for the next page that it needs, if another request computes it."""

    def __init__(self, chain: PageChain, layers: int) -> None:
        self.chain = chain
        self.allocator = chain.allocator
        self.layers = layers

    def keys(self, request: Request, decoding: Decoding) -> tuple[int, ...]:
        """Keys of the pages that a prompt fills in the blocks of `decoding`. Empty if the request shares no pages.

        Any thread may call it.
        """
        if request.policy.traits.sharing != "pages" or self.chain.page_size % decoding.block_length:
            return ()
        salt = _page_salt(request, decoding.block_length, decoding.block_offset)
        return tuple(self.chain.identities(_whole_blocks(request, decoding), salt, decoding.block_offset))

    def plan(self, pending: PendingRequest) -> Decision:
        """See `Sharing`. The request publishes its pages if they hold whole blocks and the store can hold a page."""
        request, decoding, size = pending.request, pending.decoding, self.chain.page_size
        block_length, block_offset = decoding.block_length, decoding.block_offset
        if self.chain.is_next_pending(pending.page_keys):
            return AwaitsPage()
        salt = _page_salt(request, block_length, block_offset)
        pages = tuple(self.chain.find(_whole_blocks(request, decoding), pending.page_keys, salt, block_offset))
        extents = self.allocator.find([(decoding.length - len(pages) * size, range(self.layers))])
        if extents is None:
            return NoRoom(pages=frozenset(page.key for page in pages))
        publishes = not size % block_length and self.chain.budget_tokens >= size
        plan = PagePlan(pages, salt, publishes)
        reason = None if pages else self._unread_reason(pending)
        return Placement(request.policy.without_prefix, (extents,), pages=plan, unread_reason=reason)

    def _unread_reason(self, pending: PendingRequest) -> UnreadReason | None:
        """Why a request reads no stored page; None if the pages of its prompt are just not stored yet."""
        request, decoding = pending.request, pending.decoding
        size, budget = self.chain.page_size, self.chain.budget_tokens
        if size % decoding.block_length:
            note = f"pages of {size} tokens hold no whole number of blocks of {decoding.block_length}: none is shared"
            return UnreadReason("pages", note)
        if budget < size:
            return UnreadReason("budget", f"the store's budget of {budget} tokens holds no page of {size}")
        if not pending.page_keys:
            prompt_length = len(request.prompt_token_ids)
            return UnreadReason("short", f"the prompt of {prompt_length} tokens fills no page of {size}")
        return self._misaligned_reason(request, decoding) or no_entry_reason(request.cache_salt)

    def _misaligned_reason(self, request: Request, decoding: Decoding) -> UnreadReason | None:
        """Why a stored page of the prompt's beginning is not read; None unless its blocks end at other tokens."""
        tokens, block_length = request.prompt_token_ids, decoding.block_length
        for block_offset in range(block_length) if decoding.from_prompt else ():
            salt = _page_salt(request, block_length, block_offset)
            key = self.chain.identity(tokens[self.chain.token_slice(0, block_offset)], None, salt)
            if self.chain.find(tokens, [key], salt, block_offset):
                return UnreadReason(
                    "blocks",
                    f"blocks of {block_length} are counted from the end of the prompt, whose {len(tokens)} tokens "
                    f"leave {decoding.block_offset}; the page stored of its beginning is of prompts that leave "
                    f"{block_offset}",
                )
        return None

    def claim(self, pending: PendingRequest, placement: Placement, canvas: Canvas, undo: ExitStack) -> SharedKV:
        """See `Sharing`. Counts the lookup, and announces the pages that the request will publish."""
        plan = placement.pages
        assert plan is not None
        pages = plan.stored_pages
        for page in pages:
            self.allocator.retain(page.extent)
            undo.callback(self.allocator.release, page.extent)
        self.chain.record_lookup(pages, len(pending.page_keys))
        prefix = PrefixHit(len(pages) * self.chain.page_size, self.layers) if pages else None
        if not plan.publishes:
            return SharedKV(prefix, pages=pages)
        publisher = PageSharing(
            chain=self.chain,
            canvas=canvas,
            block_length=pending.decoding.block_length,
            block_offset=pending.decoding.block_offset,
            salt=plan.salt,
            stored_pages=list(pages),
            extents=placement.extents[0][0].split(),
            keys=list(pending.page_keys),
        )
        undo.callback(publisher.release)
        return SharedKV(prefix, pages=pages, publisher=publisher)


def _whole_blocks(request: Request, decoding: Decoding) -> Sequence[int]:
    """The leading tokens of the prompt that fill whole blocks."""
    tokens = request.prompt_token_ids
    return tokens[: len(tokens) - (len(tokens) - decoding.block_offset) % decoding.block_length]


def _page_salt(request: Request, block_length: int, block_offset: int) -> str:
    """The salt of a request's page hashes: pages of other grids of blocks, adapters and tenants never match."""
    return f"{block_length}+{block_offset}:{request.salt}"
