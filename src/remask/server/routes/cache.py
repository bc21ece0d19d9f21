"""Lists and drops stored prefixes."""

from dataclasses import asdict
from typing import Annotated, Any, TypeAlias, cast

from fastapi import Request, Response
from pydantic import Field

from remask.engine.engine import Engine
from remask.policies.base import Reason
from remask.server.answers.base import Answer, doc
from remask.server.errors import ApiError, json_response
from remask.server.service import service_of

# Page tables are what `remask inspect store` shows: their time grows with the number of pages.
Empty: TypeAlias = Annotated[list[Any], Field(max_length=0)]


class StoredPrefix(Answer):
    """A stored prefix."""

    prefix_id: str
    tokens: int
    layers: int
    bytes: int
    hits: int
    leases: Annotated[int, doc("Running requests that read it.")]
    ready: bool


class Recent(Answer):
    """Prompts that shared beginnings are looked for in."""

    prompts: int
    tokens: int


class PageHolder(Answer):
    """A running request, or a part of the store. Pages are counted once a layer."""

    name: str
    tokens: int
    pages: int
    shared: int
    found: int
    tables: Empty


class PageReport(Answer):
    """The engine's pages, counted once a layer, and how full they are."""

    page_size: int
    total: int
    used: int
    shared: int
    references: int
    slots: int
    wasted: int
    bytes: int
    asked_tokens: int
    hit_tokens: int
    holders: list[PageHolder]
    stored: Empty
    utilisation: float


class CacheContents(Answer):
    """Stored prefixes in the order of eviction, and pages."""

    entries: list[StoredPrefix]
    tokens: int
    budget_tokens: int
    hits: int
    misses: int
    evictions: int
    found: int
    unread: Annotated[
        dict[Reason, int],
        doc("Requests that read no stored prefix, by reason; `prefix_note` in the answers of these says it in words."),
    ]
    recent: Recent
    pages: PageReport


class Dropped(Answer):
    """How many prefixes and pages were dropped."""

    dropped: int


async def list_entries(request: Request) -> Response:
    """List all stored prefixes in the order of eviction."""
    return json_response(await service_of(request).engine.call(_contents))


async def drop_all(request: Request) -> Response:
    """Drop every stored prefix and every page of the page chain that no running request reads."""
    dropped = await service_of(request).engine.call(lambda engine: engine.store.drop() + engine.memory.chain.drop())
    return json_response({"dropped": dropped})


async def drop(request: Request, prefix_id: str) -> Response:
    """Drop one stored prefix."""

    def drop_entry(engine: Engine) -> int | None:
        keys = [entry.key for entry in engine.store.entries if _id(entry.key) == prefix_id]
        return engine.store.drop(keys[0]) if keys else None

    dropped = await service_of(request).engine.call(drop_entry)
    if dropped is None:
        raise ApiError(404, f"there is no stored prefix {prefix_id!r}; GET /v1/cache lists them")
    if dropped == 0:
        raise ApiError(409, f"the prefix {prefix_id} is read by running requests; try again when they have ended")
    return json_response({"dropped": dropped})


def _contents(engine: Engine) -> CacheContents:
    store = engine.store
    memory = engine.memory_report()
    return {
        "entries": cast("list[StoredPrefix]", [asdict(info) for info in store.describe()]),
        "tokens": store.tokens,
        "budget_tokens": store.budget_tokens,
        "hits": store.stats.hits,
        "misses": store.stats.misses,
        "evictions": store.stats.evictions,
        "found": store.stats.found,
        "unread": cast("dict[Reason, int]", dict(store.stats.unread)),
        "recent": {"prompts": engine.memory.recent.prompts, "tokens": engine.memory.recent.tokens},
        "pages": cast("PageReport", asdict(memory) | {"utilisation": memory.utilisation}),
    }


def _id(key: int) -> str:
    return f"{key:016x}"
