"""Lists and drops stored prefixes."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, TypeAlias, cast

from fastapi import Request, Response
from pydantic import ConfigDict, Field, create_model

from remask.engine.audit_report import AuditReport, DepthReport, Divergence
from remask.engine.engine import Engine
from remask.engine.report import Holder, MemoryReport
from remask.policies.base import UnreadLabel
from remask.server.answers.base import Answer, doc
from remask.server.errors import ApiError, json_response
from remask.server.service import service_of
from remask.store.entries import EntryInfo

# Page tables are what `remask inspect store` shows: their time grows with the number of pages.
Empty: TypeAlias = Annotated[list[Any], Field(max_length=0)]


def _schema(name: str, text: str, cls: type[Any], **others: Any) -> Any:
    """A pydantic model for the OpenAPI document, with the fields of the dataclass `cls` and `others`."""
    keys = {field.name: field.type for field in fields(cls)} | others
    forms: Any = {key: (kind, ...) for key, kind in keys.items()}
    return create_model(name, __doc__=text, __config__=ConfigDict(extra="forbid"), **forms)


_LEASES = Annotated[int, doc("Running requests that read it.")]
StoredPrefix = _schema("StoredPrefix", "A stored prefix.", EntryInfo, leases=_LEASES)
_HOLDS = "A running request, or a part of the store. Pages are counted once a layer."
_PAGES = "The engine's pages, counted once a layer, and how full they are."
_HOLDERS: Any = list[_schema("PageHolder", _HOLDS, Holder, tables=Empty)]  # type: ignore[misc]
PageReport = _schema("PageReport", _PAGES, MemoryReport, holders=_HOLDERS, stored=Empty, utilisation=float)


_AUDITS = "What audits of requests have found of caches, and of the depth to which prefixes may be read."
_DIVERGENCE: Any = _schema("Divergence", cast(str, Divergence.__doc__), Divergence)
_RATIO: Any = _schema(
    "AuditedDepths", "What audits have shown of one prefix ratio.", DepthReport, nats=Mapping[int, _DIVERGENCE]
)
Audits = _schema("Audits", _AUDITS, AuditReport, caches=Mapping[str, _DIVERGENCE], depths=list[_RATIO])


class Recent(Answer):
    """Prompts that shared beginnings are looked for in."""

    prompts: int
    tokens: int


class CacheContents(Answer):
    """Stored prefixes in the order of eviction, and pages."""

    entries: list[StoredPrefix]  # type: ignore[valid-type]
    tokens: int
    budget_tokens: int
    hits: int
    misses: int
    evictions: int
    found: int
    unread: Annotated[
        dict[UnreadLabel, int],
        doc("Requests that read no stored prefix, by reason; `prefix_note` in the answers of these says it in words."),
    ]
    recent: Recent
    audits: Audits  # type: ignore[valid-type]
    pages: PageReport  # type: ignore[valid-type]


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
        key = next((entry.key for entry in engine.store.entries if f"{entry.key:016x}" == prefix_id), None)
        return None if key is None else engine.store.drop(key)

    dropped = await service_of(request).engine.call(drop_entry)
    if dropped is None:
        raise ApiError(404, f"there is no stored prefix {prefix_id!r}; GET /v1/cache lists them")
    if dropped == 0:
        raise ApiError(409, f"the prefix {prefix_id} is read by running requests; try again when they have ended")
    return json_response({"dropped": dropped})


def _contents(engine: Engine) -> CacheContents:
    """What the prefix store holds. Runs on the engine's thread, between two steps."""
    store = engine.store
    memory = engine.memory_report()
    return {
        "entries": [asdict(info) for info in store.describe()],
        "tokens": store.token_count,
        "budget_tokens": store.budget_tokens,
        "hits": store.stats.hits,
        "misses": store.stats.misses,
        "evictions": store.stats.evictions,
        "found": store.stats.unnamed,
        "unread": cast("dict[UnreadLabel, int]", dict(store.stats.unread_reasons)),
        "recent": {"prompts": engine.memory.recent.prompt_count, "tokens": engine.memory.recent.token_count},
        "audits": asdict(engine.auditor.report()),
        "pages": asdict(memory) | {"utilisation": memory.utilisation},
    }
