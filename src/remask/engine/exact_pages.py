"""Sharing of exact pages: where K/V depend only on earlier tokens, equal leading tokens have equal pages."""

from collections.abc import Sequence
from contextlib import ExitStack

from remask.engine.leases import no_entry
from remask.engine.placement import AwaitsPage, Decision, NoRoom, PagePlan, PageSharing, Placement, Shared
from remask.engine.request import PendingRequest, Request
from remask.plan.canvas import Canvas
from remask.plan.plan import PrefixHit
from remask.policies.base import Unread
from remask.sampling.decoder import Decoding
from remask.store.chain import PageChain


class Pages:
    """A `Sharing` of exact pages, on a model of `layers`."""

    def __init__(self, chain: PageChain, layers: int) -> None:
        self.chain, self.allocator, self.layers = chain, chain.allocator, layers

    def keys(self, request: Request, decoding: Decoding) -> tuple[int, ...]:
        """Identities of the pages that a prompt fills, in the blocks of `decoding`. Any thread may ask for them.

        Empty where the policy shares no pages, or where a page holds no whole number of blocks.
        """
        if request.policy.traits.sharing != "pages" or self.chain.page_size % decoding.block:
            return ()
        tokens, salt = _whole_blocks(request, decoding), _salt(request, decoding.block, decoding.ahead)
        return tuple(self.chain.identities(tokens, salt, decoding.ahead))

    def plan(self, pending: PendingRequest) -> Decision:
        """See `Sharing`. A request awaits the next page that it needs, if one computes it."""
        request, decoding, size = pending.request, pending.decoding, self.chain.page_size
        block, ahead = decoding.block, decoding.ahead
        if self.chain.awaited(pending.page_keys):
            return AwaitsPage()
        salt = _salt(request, block, ahead)
        pages = tuple(self.chain.find(_whole_blocks(request, decoding), pending.page_keys, salt, ahead))
        own = self.allocator.find([(decoding.length - len(pages) * size, range(self.layers))])
        if own is None:
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
        return Placement(request.policy.without_prefix, (own,), pages=PagePlan(pages, salt, publishes), unread=unread)

    def _elsewhere(self, request: Request, decoding: Decoding) -> Unread | None:
        """Why a stored beginning of the prompt is not read: the blocks of its pages end at other tokens of it."""
        tokens, block = request.prompt_token_ids, decoding.block
        for ahead in range(block) if decoding.from_prompt else ():
            salt = _salt(request, block, ahead)
            key = self.chain.identity(tokens[self.chain.known_by(0, ahead)], None, salt)
            if self.chain.find(tokens, [key], salt, ahead):
                return Unread(
                    "blocks",
                    f"blocks of {block} are counted from the end of the prompt, whose {len(tokens)} tokens leave "
                    f"{decoding.ahead}; the page stored of its beginning is of prompts that leave {ahead}",
                )
        return None

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
        grid = pending.decoding.block, pending.decoding.ahead
        publishes = PageSharing(self.chain, canvas, *grid, plan.salt, list(plan.found), own, keys)
        undo.callback(publishes.release)
        return Shared(prefix, pages=plan.found, publishes=publishes)


def _whole_blocks(request: Request, decoding: Decoding) -> Sequence[int]:
    """The leading tokens of a prompt that make whole blocks."""
    tokens = request.prompt_token_ids
    return tokens[: len(tokens) - (len(tokens) - decoding.ahead) % decoding.block]


def _salt(request: Request, block: int, ahead: int) -> str:
    """The salt of a request's page hashes: pages of other grids of blocks, adapters and tenants never match."""
    return f"{block}+{ahead}:{request.salt}"
