"""Sharing of parts anywhere in a prompt. A request reads each part that it names as a whole, or not at all."""

from collections.abc import Sequence

from remask.engine.pending import PendingRequest
from remask.engine.placement import LeasePlan, PartPlan
from remask.engine.sharing.leases import Leases, Wish
from remask.plan.plan import PrefixHit
from remask.request.segments import stored_parts


class Parts(Leases):
    """A `Sharing` of the parts that requests name."""

    def wish(self, pending: PendingRequest) -> Wish:
        """See `Leases`."""
        request, policy, layers = pending.request, pending.request.policy, self.shape.layers
        if self.config.prefix_sharing == "off":
            return Wish(note="prefix_sharing is off")
        prompt, most = request.prompt_token_ids, self.longest(pending)
        named = [part for part in stored_parts(request.segments, len(prompt)) if part.start < most]
        parts = self._fitting(pending, [range(part.start, min(part.stop, most)) for part in named])
        tokens = sum(map(len, parts))
        note = None
        if left := len(named) - len(parts):
            budget = self.store.budget_tokens
            note = f"{left} of {len(named)} parts are not read: the store's budget is {budget} tokens"
        boundary = policy.boundary(tokens, pending.decoding.length, layers) if tokens else 0
        if not boundary:
            return Wish(note=note, refused=note is not None, kept=tuple(parts))
        found = [self.store.whole(prompt[part.start : part.stop], request.cache_salt) for part in parts]
        leased = policy.leased_layers(boundary, layers)
        hit = PrefixHit(tokens, boundary, leased, tuple(parts), policy.traits.copies)
        return Wish(LeasePlan(hit, tuple(map(PartPlan, parts, found))), note=note, refused=note is not None)

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
