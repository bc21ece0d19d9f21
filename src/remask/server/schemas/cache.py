"""What is told of the prefix store and of the engine's pages."""

from typing import Annotated, Any, TypeAlias

from pydantic import Field

from remask.server.schemas.base import Answer

# Page tables are what `remask inspect store` shows: their time grows with the number of pages.
Empty: TypeAlias = Annotated[list[Any], Field(max_length=0)]


class StoredPrefix(Answer):
    """A stored prefix."""

    prefix_id: str
    tokens: int
    layers: int
    bytes: int
    hits: int
    leases: int
    """Running requests that read it."""
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
    recent: Recent
    pages: PageReport


class Dropped(Answer):
    """How many prefixes and pages were dropped."""

    dropped: int
