"""Sharing of a prompt's prefix, which all requests that lease it read in place."""

from remask.engine.config import EngineConfig
from remask.engine.pending import PendingRequest
from remask.engine.placement import LeasePlan, PartPlan
from remask.engine.sharing.leases import Leases, Wish
from remask.model.config import ModelConfig
from remask.plan.plan import PrefixHit
from remask.policies.base import CachePolicy
from remask.store.entry import PrefixEntry
from remask.store.prefix import PrefixStore
from remask.store.recent import RecentPrompts


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
            pending.common = min(self.recent.add(prompt, request.cache_salt), most)

    def wish(self, pending: PendingRequest) -> Wish:
        """See `Leases`."""
        request, policy, shape, canvas = pending.request, pending.request.policy, self.shape, pending.decoding.length
        if self.config.prefix_sharing == "off":
            return Wish(note="prefix_sharing is off" if request.prefix_length else None)
        prefix = self._asked(pending)
        boundary = policy.boundary(prefix, canvas, shape.layers) if prefix > 0 else 0
        if not boundary:
            return Wish(kept=(range(prefix),) if prefix > 0 else ())
        entry = self.store.find(request.prompt_token_ids[:prefix], request.cache_salt)
        if entry is not None:
            wish = self._read(policy, entry, prefix, canvas)
            if wish.lease is not None or len(entry) == prefix:
                return wish
        if not self.store.fits(prefix):
            note = f"prefix of {prefix} tokens exceeds the store's budget of {self.store.budget_tokens}"
            return Wish(note=note, refused=True)
        return Wish(_lease(policy, prefix, boundary, shape.layers, prefix, None))

    def _asked(self, pending: PendingRequest) -> int:
        """Leading tokens that a request shares: those that it names, or those that were found."""
        request, config, most = pending.request, self.config, self.longest(pending)
        if pending.common is not None:
            level = self.store.level(request.prompt_token_ids[: max(0, most)], request.cache_salt)
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
            return Wish(kept=(range(asked),))
        return Wish(_lease(policy, length, boundary, self.shape.layers, asked, entry))


def _lease(
    policy: CachePolicy, length: int, boundary: int, layers: int, asked: int, entry: PrefixEntry | None
) -> LeasePlan:
    """A lease of a prefix of `length` of the `asked` tokens as `policy` asks for it, on a model of `layers`."""
    hit = PrefixHit(length, boundary, policy.leased_layers(boundary, layers), copied=policy.traits.copies)
    return LeasePlan(hit, (PartPlan(range(asked), entry),))
