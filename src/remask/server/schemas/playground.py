"""Answers to the page at `/`."""

from typing import Any, Literal

from remask.server.schemas.base import Answer


class ExampleTurn(Answer):
    """A turn of the example."""

    role: Literal["system", "user"]
    content: str


class Example(Answer):
    """What the page starts with."""

    messages: list[ExampleTurn]
    answer: str | None
    """The right answer, where one is known."""
    canvas: str
    decision: dict[str, Any] | None
    sampling: dict[str, Any]
    policies: list[str]
    pair: tuple[str, str]
    """Two policies to compare."""
    cache: str
    cache_config: dict[str, Any] | None


class SandboxPage(Answer):
    """A page and the requests that read it."""

    page: int
    references: int
    requests: list[int]
    stored: bool
    slots_filled: int


class SandboxRequest(Answer):
    """A request and its pages."""

    request: int
    shared_prefix: bool
    page_table: list[int]
    pages_found: int
    tokens: int
    prompt_tokens: int
    settled_tokens: int
    response_tokens: int


class SandboxTotals(Answer):
    """Sums over all pages."""

    pages: int
    pages_in_use: int
    pages_cached: int
    pages_shared: int
    pages_saved: int
    slots_in_use: int
    slots_wasted: int
    utilisation: float | None
    tokens_queried: int
    tokens_hit: int
    evictions: int


class SandboxState(Answer):
    """A session: its pages, its requests and their totals."""

    session: str
    page_size: int
    caching: bool
    pages: list[SandboxPage]
    requests: list[SandboxRequest]
    totals: SandboxTotals


class Closed(Answer):
    """The session that was ended."""

    closed: str
