"""Placing a request whose committed pages are shared exactly, page by page."""

from typing import Literal, TypeAlias

from remask.core.ledger import Ledger
from remask.core.plan import PrefixHit
from remask.engine.canvas_state import CanvasState, plain_table, shared_table
from remask.engine.job import Job
from remask.engine.sharing import PageSharing
from remask.models.config import ModelConfig
from remask.store.chain import PageChain

Placement: TypeAlias = Literal["placed", "full", "awaiting"]


def place_paged(job: Job, shape: ModelConfig, chain: PageChain) -> Placement:
    """Give a request its canvas and pages, those of its prompt that are stored among them.

    Nothing is changed where there is no room, or where another request is computing the next page that it needs.
    """
    tokens, size, block = job.request.prompt_token_ids, chain.page_size, job.decoding.block
    salt = f"{block}:{job.request.cache_salt}"
    prompt = tokens[: len(tokens) // block * block]
    if job.page_keys is None:  # a request that waits comes here in every step
        job.page_keys = chain.identities(prompt, salt) if size % block == 0 else []
    keys = job.page_keys
    if chain.awaited(keys):
        return "awaiting"
    canvas = job.decoding.canvas()
    found = chain.match(prompt, keys, salt)
    pages = [page.extent for page in found]
    job.owned += pages
    hit = len(pages) * size
    while (own := chain.allocator.allocate(len(canvas) - hit, range(shape.layers))) is None:
        if not chain.give_way():
            for page in job.owned:
                chain.allocator.release(page)
            job.owned.clear()
            return "full"
    job.owned.append(own)
    prefix = PrefixHit(hit, shape.layers) if pages else None
    branch = CanvasState(
        canvas=canvas,
        ledger=Ledger(shape.layers, len(canvas), prefix),
        tables=(shared_table(pages, own) if pages else plain_table(own),),
        prefix=prefix,
        shift=shape.shift,
        chain=found[-1].key if found else 0,
    )
    job.start((branch,), None)
    chain.found(found, len(keys))
    if size % block:
        job.usage.prefix_note = f"pages of {size} tokens hold no whole number of blocks of {block}: none is shared"
    elif chain.budget_tokens >= size:
        job.sharing = PageSharing(chain, canvas, block, salt, found, own.single(), keys)
    job.usage.cached_tokens, job.usage.prefix_depth = hit, shape.layers if pages else 0
    return "placed"
