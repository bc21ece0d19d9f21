"""Endpoints that report the model, the server's health and its metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response

from remask import __version__
from remask.sampling.defaults import overlaid
from remask.server.bodies import BodyRoute
from remask.server.document import answers, plain
from remask.server.errors import ApiError, json_response
from remask.server.metrics import CONTENT_TYPE
from remask.server.routes.common import service_of
from remask.server.schemas.info import Health, Model, ModelInfo, Models, Version
from remask.server.service import Service
from remask.tasks.cards import card


async def models(request: Request) -> Response:
    """List the names that requests may give as `model`."""
    service = service_of(request)
    entries = [_model(service, name) for name in service.config.model_names]
    return json_response({"object": "list", "data": entries})


async def model(request: Request, name: str) -> Response:
    """Describe one model."""
    service = service_of(request)
    service.intake.check_model(name)
    return json_response(_model(service, name))


async def health(request: Request) -> Response:
    """Answer 200 while requests are accepted.

    Answer 503 while the server drains, while a step of the engine takes too long, and after the engine has died.
    """
    engine = service_of(request).engine
    if not engine.alive:
        raise ApiError(503, f"the engine is dead: {engine.error}", code="engine_dead")
    if engine.draining:
        raise ApiError(503, "draining: the server is about to stop")
    seconds = engine.overdue  # read once: the step may end meanwhile
    if seconds is not None:
        raise ApiError(
            503,
            f"a step of the engine has taken {seconds:.1f} s; more than {engine.step_limit:g} s are too long",
            code="step_overdue",
        )
    choice = service_of(request).llm.engine.choice
    computing = {
        "attention": choice.executor.name,
        "attention_why": choice.executor.why,
        "overlap": choice.overlap,
        "graphs": choice.graphs,
        "overlap_and_graphs_why": choice.why,
    }
    return json_response({"status": "ok", "computing": computing})


async def version() -> Response:
    """Return the version of remask."""
    return json_response({"version": __version__})


async def get_model_info(request: Request) -> Response:
    """Return the model's dimensions and the server's limits."""
    service = service_of(request)
    llm, shape = service.llm, service.llm.loaded.config
    fields = {
        "model_path": llm.loaded.name,
        "is_generation": True,
        "family": shape.family,
        "fingerprint": llm.loaded.fingerprint,
        "parameters": shape.parameters,
        "layers": shape.layers,
        "vocab_size": shape.vocab,
        "mask_token_id": shape.mask_id,
        "stop_token_ids": list(shape.stop_ids),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "device": str(llm.model.device),
        "max_model_len": llm.engine.max_model_len,
        "max_num_seqs": llm.engine_config.max_num_seqs,
        "max_queue": service.config.max_queue,
        "max_steps": llm.engine.limits.steps,
        "max_request_row_layers": llm.engine.limits.row_layers,
        "cache": llm.cache_name,
        "cache_config": llm.cache_config,
        "store_budget_tokens": llm.engine.memory.store_budget,
        "has_chat_template": service.intake.tokenizer.has_chat_template,
        "sampling": overlaid(llm.sampling, service.config.sampling),
    }
    return json_response(fields)


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE)


def router() -> APIRouter:
    """The routes of this module."""
    made = APIRouter(route_class=BodyRoute)
    made.add_api_route("/v1/models", models, methods=["GET"], responses=answers(Models))
    made.add_api_route("/v1/models/{name:path}", model, methods=["GET"], responses=answers(Model, 404))
    made.add_api_route("/health", health, methods=["GET"], responses=answers(Health, 503))
    for method in ("GET", "POST"):
        made.add_api_route("/ping", health, methods=[method], responses=answers(Health, 503))
    made.add_api_route("/version", version, methods=["GET"], responses=answers(Version))
    made.add_api_route("/get_model_info", get_model_info, methods=["GET"], responses=answers(ModelInfo))
    made.add_api_route(
        "/metrics", metrics, methods=["GET"], response_class=Response, responses=plain(CONTENT_TYPE.partition(";")[0])
    )
    return made


def _model(service: Service, name: str) -> dict[str, Any]:
    told = {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "remask",
        "max_model_len": service.llm.engine.max_model_len,
    }
    known = card(service.llm.loaded.name)
    return told if known is None else {**told, "card": known.as_json()}
