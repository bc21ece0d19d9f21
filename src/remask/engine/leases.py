"""Leases of stored prefixes."""

from contextlib import ExitStack
from dataclasses import dataclass

from remask.engine.config import EngineConfig
from remask.engine.placement import Decision, LeasePlan, NoRoom, Placement, Shared
from remask.engine.request import PendingRequest
from remask.errors import IntegrityError
from remask.model.config import ModelConfig
from remask.plan.canvas import Canvas
from remask.plan.plan import PrefixHit
from remask.policies.base import CachePolicy, Unread
from remask.policies.bicache import BiCache, Earned
from remask.policies.earned import EarnedDepths
from remask.store.entries import PrefixEntry
from remask.store.prefix import Lease, PrefixStore
from remask.store.recent import RecentPrompts

OFF = Unread("off", "prefix_sharing is off")


@dataclass(frozen=True, slots=True)
class Wish:
    """The lease that a request would get.

    Attributes:
        lease: the lease; None: none.
        unread: why it leases nothing.
        kept: the leading tokens that it shares, if its policy reads none of them from the store.
    """

    lease: LeasePlan | None = None
    unread: Unread | None = None
    kept: int = 0


class Prefixes:
    """A `Sharing` of prefixes: those that requests name, and those that recent prompts are found to have in common.

    They are whole entries of the store, which are leased for as long as a request runs.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        store: PrefixStore,
        recent: RecentPrompts,
        depths: EarnedDepths | None = None,
    ) -> None:
        """For requests under `config` to a model of `shape`.

        `recent` are the prompts of late. `depths` are those that audits have earned; None: they earn none.
        """
        self.config, self.shape, self.store, self.recent, self.depths = config, shape, store, recent, depths
        self.allocator = store.allocator

    def plan(self, pending: PendingRequest) -> Decision:
        """See `Sharing`: a place with a lease, if the request asks for one and the store can hold the entry."""
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
        found = self.allocator.find([*wanted, *others])
        if found is None:
            return NoRoom(entry)
        if lease is not None and entry is None:
            tokens = pending.request.prompt_token_ids[: lease.asked]
            if not self.store.has_room(tokens, pending.request.salt, found):
                return NoRoom(evictable=False)
        own = (found[: len(wanted)], *((extent,) for extent in found[len(wanted) :]))
        if lease is not None:
            return Placement(self.policy(pending, lease.prefix.length), own, lease, unread=wish.unread)
        return Placement(self.policy(pending, wish.kept).within(wish.kept), own, unread=wish.unread, kept=wish.kept)

    def claim(
        self,
        pending: PendingRequest,
        placement: Placement,
        canvas: Canvas,  # noqa: ARG002
        undo: ExitStack,
    ) -> Shared:
        """See `Sharing`."""
        plan = placement.lease
        if plan is None:
            return Shared()
        lease = self._lease(pending, plan)
        undo.callback(self._unlease, lease)
        self.store.stats.found += pending.common is not None and plan.asked > pending.request.prefix_length
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
        """Release a new lease, and remove the entry that was made for it."""
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
            level = self.store.level(request.prompt_token_ids[: max(0, most)], request.salt)
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

    def _read(self, pending: PendingRequest, entry: PrefixEntry, asked: int) -> Wish:
        """What a request that asked for `asked` tokens would lease of `entry`."""
        # The boundary depends on the length that is read, not on the length that was asked for.
        length, canvas = len(entry), pending.decoding.length
        policy = self.policy(pending, length)
        boundary = policy.boundary(length, canvas, self.shape.layers)
        if not boundary:
            return Wish(unread=pending.request.policy.unread(length, canvas), kept=asked)
        return Wish(_lease(policy, length, boundary, self.shape.layers, asked, entry))


def _lease(
    policy: CachePolicy, length: int, boundary: int, layers: int, asked: int, entry: PrefixEntry | None
) -> LeasePlan:
    """A lease of a prefix of `length` of the `asked` tokens as `policy` asks for it, on a model of `layers`."""
    hit = PrefixHit(length, boundary, policy.leased_layers(boundary, layers), copied=policy.traits.copies)
    return LeasePlan(hit, asked, entry)


def no_entry(cache_salt: str) -> Unread | None:
    """Why a request reads nothing although its prefix will be stored: None where the prefix is merely new.

    Whether it is stored under another salt is told to nobody.
    """
    return Unread("salt", "nothing of this cache_salt is stored yet, and no other is read") if cache_salt else None
