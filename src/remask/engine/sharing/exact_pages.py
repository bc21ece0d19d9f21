"""Sharing of exact pages: where K/V depend only on earlier tokens, equal leading tokens have equal pages."""

from collections.abc import Sequence
from contextlib import ExitStack

from remask.engine.pending import PendingRequest
from remask.engine.placement import AwaitsPage, Decision, NoRoom, PagePlan, Placement
from remask.engine.request import Request
from remask.engine.sharing.base import Shared
from remask.engine.sharing.publishing import PageSharing
from remask.plan.canvas import Canvas
from remask.plan.plan import PrefixHit
from remask.store.chain import PageChain


class Pages:
    """A `Sharing` of exact pages, on a model of `layers`."""

    def __init__(self, chain: PageChain, layers: int) -> None:
        self.chain, self.allocator, self.layers = chain, chain.allocator, layers

    def keys(self, request: Request, block: int) -> tuple[int, ...]:
        """Identities of the pages that a prompt fills, in blocks of `block` tokens. Any thread may ask for them.

        Empty where the policy shares no pages, or where a page holds no whole number of blocks.
        """
        if request.policy.traits.sharing != "pages" or self.chain.page_size % block:
            return ()
        return tuple(self.chain.identities(_whole_blocks(request, block), _salt(request, block)))

    def plan(self, pending: PendingRequest) -> Decision:
        """See `Sharing`. A request awaits the next page that it needs, if one computes it."""
        request, block, size = pending.request, pending.decoding.block, self.chain.page_size
        if self.chain.awaited(pending.page_keys):
            return AwaitsPage()
        salt = _salt(request, block)
        pages = tuple(self.chain.find(_whole_blocks(request, block), pending.page_keys, salt))
        own = self.allocator.find([(pending.decoding.length - len(pages) * size, range(self.layers))])
        if own is None:
            return NoRoom(pages=frozenset(page.key for page in pages))
        note = None
        if size % block:
            note = f"pages of {size} tokens hold no whole number of blocks of {block}: none is shared"
        publishes = note is None and self.chain.budget_tokens >= size
        return Placement(request.policy.without_prefix, (own,), pages=PagePlan(pages, salt, publishes), note=note)

    def claim(self, pending: PendingRequest, placement: Placement, canvas: Canvas, undo: ExitStack) -> Shared:
        """See `Sharing`."""
        plan = placement.pages
        assert plan is not None
        for page in plan.found:
            self.allocator.retain(page.extent)
            undo.callback(self.allocator.release, page.extent)
        self.chain.found(plan.found, len(pending.page_keys))
        prefix = PrefixHit(len(plan.found) * self.chain.page_size, self.layers) if plan.found else None
        if not plan.publishes:
            return Shared(prefix, pages=plan.found)
        own, keys = placement.own[0][0].single(), list(pending.page_keys)
        publishes = PageSharing(self.chain, canvas, pending.decoding.block, plan.salt, list(plan.found), own, keys)
        undo.callback(publishes.release)
        return Shared(prefix, pages=plan.found, publishes=publishes)


def _whole_blocks(request: Request, block: int) -> Sequence[int]:
    """The leading tokens of a prompt that make whole blocks."""
    tokens = request.prompt_token_ids
    return tokens[: len(tokens) // block * block]


def _salt(request: Request, block: int) -> str:
    """The salt of a request's page hashes: pages of other block lengths and tenants never match."""
    return f"{block}:{request.cache_salt}"
