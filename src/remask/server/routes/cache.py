"""Lists and drops stored prefixes."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from remask.engine.engine import Engine
from remask.server.bodies import BodyRoute
from remask.server.document import answers
from remask.server.errors import ApiError, json_response
from remask.server.routes.common import service_of
from remask.server.schemas.cache import CacheContents, Dropped


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


def router() -> APIRouter:
    """The routes of this module."""
    made = APIRouter(route_class=BodyRoute)
    made.add_api_route("/v1/cache", list_entries, methods=["GET"], responses=answers(CacheContents))
    made.add_api_route("/v1/cache", drop_all, methods=["DELETE"], responses=answers(Dropped))
    made.add_api_route("/v1/cache/{prefix_id}", drop, methods=["DELETE"], responses=answers(Dropped, 404, 409))
    return made


def _contents(engine: Engine) -> dict[str, Any]:
    store = engine.store
    token = engine.pool.bytes_per_token * engine.model.config.layers
    entries = [
        {
            "prefix_id": _id(entry.key),
            "tokens": len(entry),
            "layers": len(entry.extent.layers),
            "bytes": len(entry.extent.pages) * entry.extent.page_size * token + entry.states.nbytes,
            "hits": entry.hits,
            "leases": entry.leases,
            "ready": entry.ready,
        }
        for entry in store.entries
    ]
    memory = engine.memory_report()
    return {
        "entries": entries,
        "tokens": store.tokens,
        "budget_tokens": store.budget_tokens,
        "hits": store.stats.hits,
        "misses": store.stats.misses,
        "evictions": store.stats.evictions,
        "found": store.stats.found,
        "recent": {"prompts": engine.memory.recent.prompts, "tokens": engine.memory.recent.tokens},
        "pages": {**asdict(memory), "utilisation": memory.utilisation},
    }


def _id(key: int) -> str:
    return f"{key:016x}"
