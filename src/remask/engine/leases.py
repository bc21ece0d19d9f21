"""Leases of stored entries, for prefixes and for parts elsewhere in a prompt."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from remask.engine.config import EngineConfig
from remask.engine.placement import Decision, LeasePlan, NoRoom, PartPlan, Placement, Shared
from remask.engine.request import PendingRequest, Request
from remask.errors import IntegrityError
from remask.model.config import ModelConfig
from remask.plan.canvas import Canvas
from remask.plan.plan import PrefixHit
from remask.policies.base import CachePolicy, Unread
from remask.request.parts import stored_parts
from remask.store.entries import PrefixEntry
from remask.store.prefix import Lease, PrefixStore
from remask.store.recent import RecentPrompts

OFF = Unread("off", "prefix_sharing is off")


@dataclass(frozen=True, slots=True)
class Wish:
    """The lease that a request would get.

    Attributes:
        lease: the lease; None: none.
        unread: why it leases nothing, or not all that it asked for.
        kept: the positions that it shares, if its policy reads none of them from the store.
    """

    lease: LeasePlan | None = None
    unread: Unread | None = None
    kept: tuple[range, ...] = ()


class Leases(ABC):
    """A `Sharing` of whole entries of the store, which are leased for as long as a request runs."""

    def __init__(self, config: EngineConfig, shape: ModelConfig, store: PrefixStore) -> None:
        """For requests under `config` to a model of `shape`."""
        self.config, self.shape, self.store = config, shape, store
        self.allocator = store.allocator

    @abstractmethod
    def wish(self, pending: PendingRequest) -> Wish:
        """The lease that a request would get now."""

    def plan(self, pending: PendingRequest) -> Decision:
        """See `Sharing`: a place with leases, if the request asks for them and the store can hold the entries."""
        policy, length, layers = pending.request.policy, pending.decoding.length, self.shape.layers
        wish = self.wish(pending)
        lease = wish.lease
        entries = () if lease is None else lease.entries
        # Parts that are not read in place are copied to pages of the canvas, so one extent serves all layers.
        shared = 0 if lease is None else lease.prefix.lead
        leased = lease.prefix.layers if lease is not None and shared else 0
        parts = [(length - shared, range(leased)), (length, range(leased, layers))]
        # A lease of all layers leaves nothing for the layers above, and none leaves nothing for those below.
        wanted = [(tokens, part) for tokens, part in parts if len(part)]
        others = [(length, range(layers))] * (pending.canvases - 1)
        missing = {} if lease is None else _missing(pending.request, lease)
        found = self.allocator.find([*wanted, *others])
        if found is None:
            return NoRoom(entries)
        if missing and not self.store.has_room(list(missing), pending.request.salt, found, entries):
            return NoRoom(evictable=False)
        own = (found[: len(wanted)], *((extent,) for extent in found[len(wanted) :]))
        return Placement(policy if lease else policy.within(wish.kept), own, lease, unread=wish.unread)

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
        leases = self._leases(pending, plan, undo)
        self.store.stats.found += pending.common is not None and plan.asked > pending.request.prefix_length
        return Shared(plan.prefix, leases)

    def longest(self, pending: PendingRequest) -> int:
        """The rows that predict the response must be live, so what is shared may not reach into them."""
        return len(pending.request.prompt_token_ids) - self.shape.shift

    def _leases(self, pending: PendingRequest, plan: LeasePlan, undo: ExitStack) -> tuple[Lease, ...]:
        """Take the planned leases, in the order of the parts. `undo` gets a call that releases each of them."""
        made: dict[int, Lease] = {}
        # Stored entries are leased first, so that none is evicted for a new one.
        for number in sorted(range(len(plan.parts)), key=lambda number: plan.parts[number].entry is None):
            made[number] = self._lease(pending, plan.parts[number], plan.prefix.layers)
            undo.callback(self._unlease, made[number])
        return tuple(made[number] for number in range(len(plan.parts)))

    def _lease(self, pending: PendingRequest, plan: PartPlan, layers: int) -> Lease:
        """Take a planned lease. Raises `IntegrityError` where the store has changed since."""
        request, entry = pending.request, plan.entry
        tokens = request.prompt_token_ids[plan.asked.start : plan.asked.stop]
        if entry is None:
            entry = self.store.whole(tokens, request.salt)  # of an equal part before it
        if entry is not None:
            return self.store.lend(entry, layers, tokens)
        lease = self.store.reserve(tokens, layers, request.salt)
        if lease is None:
            raise IntegrityError("the room that was planned for a new entry is gone")
        return lease

    def _unlease(self, lease: Lease) -> None:
        """Release a new lease, and remove the entry that was made for it."""
        self.store.release(lease)
        if not lease.hit and not lease.entry.leases:
            self.store.withdraw(lease.entry)


def no_entry(cache_salt: str) -> Unread | None:
    """Why a request reads nothing although its prefix will be stored: None where the prefix is merely new.

    Whether it is stored under another salt is told to nobody.
    """
    return Unread("salt", "nothing of this cache_salt is stored yet, and no other is read") if cache_salt else None


def _missing(request: Request, plan: LeasePlan) -> dict[tuple[int, ...], None]:
    """The entries that must be computed for a lease, without duplicates."""
    missing = [part.asked for part in plan.parts if part.entry is None]
    return dict.fromkeys(tuple(request.prompt_token_ids[part.start : part.stop]) for part in missing)


class Prefixes(Leases):
    """A `Sharing` of prefixes: those that requests name, and those that recent prompts are found to have in common."""

    def __init__(self, config: EngineConfig, shape: ModelConfig, store: PrefixStore, recent: RecentPrompts) -> None:
        """As `Leases`; `recent` are the prompts of late."""
        super().__init__(config, shape, store)
        self.recent = recent

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
        request, policy, shape, canvas = pending.request, pending.request.policy, self.shape, pending.decoding.length
        prefix = self._asked(pending)
        if prefix <= 0:
            return Wish(unread=self._nothing(pending))
        if self.config.prefix_sharing == "off":
            return Wish(unread=OFF)
        boundary = policy.boundary(prefix, canvas, shape.layers)
        if not boundary:
            return Wish(unread=policy.unread(prefix, canvas), kept=(range(prefix),))
        entry = self.store.find(request.prompt_token_ids[:prefix], request.salt)
        if entry is not None:
            wish = self._read(policy, entry, prefix, canvas)
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

    def _read(self, policy: CachePolicy, entry: PrefixEntry, asked: int, canvas: int) -> Wish:
        """What a request under `policy` that asked for `asked` tokens would lease of `entry`."""
        # The boundary depends on the length that is read, not on the length that was asked for.
        length = len(entry)
        boundary = policy.boundary(length, canvas, self.shape.layers)
        if not boundary:
            return Wish(unread=policy.unread(length, canvas), kept=(range(asked),))
        return Wish(_lease(policy, length, boundary, self.shape.layers, asked, entry))


def _lease(
    policy: CachePolicy, length: int, boundary: int, layers: int, asked: int, entry: PrefixEntry | None
) -> LeasePlan:
    """A lease of a prefix of `length` of the `asked` tokens as `policy` asks for it, on a model of `layers`."""
    hit = PrefixHit(length, boundary, policy.leased_layers(boundary, layers), copied=policy.traits.copies)
    return LeasePlan(hit, (PartPlan(range(asked), entry),))


class Parts(Leases):
    """A `Sharing` of the parts that requests name."""

    def wish(self, pending: PendingRequest) -> Wish:
        request, policy, layers = pending.request, pending.request.policy, self.shape.layers
        if self.config.prefix_sharing == "off":
            return Wish(unread=OFF)
        prompt, most = request.prompt_token_ids, self.longest(pending)
        named = [part for part in stored_parts(request.segments, len(prompt)) if part.start < most]
        parts = self._fitting(pending, [range(part.start, min(part.stop, most)) for part in named])
        tokens = sum(map(len, parts))
        unread = None
        if left := len(named) - len(parts):
            why = f"{left} of {len(named)} parts are not read: the store's budget is {self.store.budget_tokens} tokens"
            unread = Unread("budget", why)
        boundary = policy.boundary(tokens, pending.decoding.length, layers) if tokens else 0
        if not boundary:
            return Wish(unread=unread or policy.unread(tokens, pending.decoding.length), kept=tuple(parts))
        found = [self.store.whole(prompt[part.start : part.stop], request.salt) for part in parts]
        leased = policy.leased_layers(boundary, layers)
        hit = PrefixHit(tokens, boundary, leased, tuple(parts), policy.traits.copies)
        unread = unread or (None if any(found) else no_entry(request.cache_salt))
        return Wish(LeasePlan(hit, tuple(map(PartPlan, parts, found))), unread)

    def _fitting(self, pending: PendingRequest, parts: Sequence[range]) -> list[range]:
        """The first of `parts` that the store can hold together, with room left for the canvas."""
        prompt, pages_for = pending.request.prompt_token_ids, self.allocator.pages_for
        budget, room = self.store.budget_tokens, self.allocator.references.shape[1]
        tokens, pages = 0, pending.canvases * pages_for(pending.decoding.length)
        seen, fitting = set[tuple[int, ...]](), []
        for part in parts:
            content = tuple(prompt[part.start : part.stop])
            if content not in seen:
                if tokens + len(part) >= budget or pages + pages_for(len(part)) > room:
                    continue
                seen.add(content)
                tokens, pages = tokens + len(part), pages + pages_for(len(part))
            fitting.append(part)
        return fitting
