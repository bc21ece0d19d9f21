"""Endpoints that report the model, the server's health and its metrics."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired, cast

from fastapi import Request, Response

from remask import __version__
from remask.server.answers.base import Answer, doc
from remask.server.errors import ApiError, json_response
from remask.server.metrics import CONTENT_TYPE
from remask.server.protocol.reads import JEV_LATEST
from remask.server.service import Service, service_of
from remask.tasks.cards import card


class CardQuestion(Answer):
    """A question that a bundled model can answer."""

    question: str
    answer: Annotated[str, doc("The right answer; empty where there are many.")]
    canvas: Annotated[str, doc("The answer with holes: `[[n]]` is one of n tokens.")]
    decision: Annotated[dict[str, Any] | None, doc("The same as a question of `/v1/decisions`.")]


class ModelCard(Answer):
    """What a bundled model can answer."""

    answers: str
    system: Annotated[str | None, doc("The system prompt that the questions are about.")]
    alone: Annotated[bool, doc("The model knows one question at a time, of the forms of these.")]
    questions: list[CardQuestion]


class Model(Answer):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["remask"]
    root: Annotated[str, doc("The folder or hub id of the model, or of the adapter.")]
    parent: Annotated[str | None, doc("Of an adapter the name of the model that it changes.")]
    max_model_len: int
    card: NotRequired[ModelCard]


class ListedModel(Answer):
    """A name that `/v1/systemone` takes, as that API lists them."""

    name: str
    description: str
    release_date: Annotated[str, doc("The day on which the server started.")]


class Models(Answer):
    """All served names; `models` has them in System One's form."""

    object: Literal["list"]
    data: list[Model]
    models: list[ListedModel]


class Computing(Answer):
    """What computes passes, and why."""

    attention: str
    attention_why: str
    overlap: bool
    graphs: bool
    overlap_and_graphs_why: str


class Health(Answer):
    """Requests are accepted, or of `/live`: the process answers."""

    status: Literal["ok"]
    computing: Computing


class Version(Answer):
    """The version of remask."""

    version: str


class ModelInfo(Answer):
    """The model and the server's limits."""

    model_path: str
    is_generation: Literal[True]
    family: str
    fingerprint: str
    parameters: int
    layers: int
    vocab_size: int
    mask_token_id: int | None
    stop_token_ids: list[int]
    dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int
    max_queue: int
    max_steps: int
    max_request_row_layers: int | None
    cache: str
    cache_config: dict[str, Any]
    store_budget_tokens: int
    has_chat_template: bool
    sampling: Annotated[dict[str, Any], doc("Sampling parameters of requests that leave them out.")]


async def models(request: Request) -> Response:
    """List the names that requests may give as `model`."""
    service = service_of(request)
    entries = [_model(service, name) for name in service.intake.model_names]
    day = datetime.fromtimestamp(service.started, UTC).strftime("%Y-%m-%d")
    description = f"{service.llm.loaded.name}, served by remask"
    names = *service.intake.model_names, JEV_LATEST
    system_one = [ListedModel(name=name, description=description, release_date=day) for name in names]
    return json_response({"object": "list", "data": entries, "models": system_one})


async def model(request: Request, name: str) -> Response:
    """Describe one model."""
    service = service_of(request)
    service.intake.check_model(name)
    return json_response(_model(service, name))


async def health(request: Request) -> Response:
    """Answer 200 while requests are accepted.

    Answer 503 while the server drains, while a step of the engine takes too long, and after the engine has died.
    """
    answer = await live(request)
    engine = service_of(request).engine
    if engine.draining:
        raise ApiError(503, "draining: the server is about to stop", code="draining")
    step_seconds = engine.overdue_step_s  # read once: the step may end meanwhile
    if step_seconds is not None:
        raise ApiError(
            503,
            f"a step of the engine has taken {step_seconds:.1f} s; at most {engine.step_limit:g} s are allowed",
            code="step_overdue",
        )
    return answer


async def live(request: Request) -> Response:
    """Answer 200 while the process answers: also while it drains or a step takes too long.

    Answer 503 after the engine has died, which only a new process mends.
    """
    service = service_of(request)
    if not service.engine.alive:
        raise ApiError(503, f"the engine is dead: {service.engine.error}", code="engine_dead")
    choice = service.llm.engine.choice
    computing: Computing = {
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
    llm = service.llm
    config = llm.loaded.config
    info: ModelInfo = {
        "model_path": llm.loaded.name,
        "is_generation": True,
        "family": config.family,
        "fingerprint": llm.loaded.fingerprint,
        "parameters": config.parameters,
        "layers": config.layers,
        "vocab_size": config.vocab,
        "mask_token_id": config.mask_id if config.mask_id >= 0 else None,
        "stop_token_ids": list(config.stop_ids),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "device": str(llm.model.device),
        "max_model_len": llm.engine.max_model_len,
        "max_num_seqs": llm.session.engine_config.max_num_seqs,
        "max_queue": service.config.max_queue,
        "max_steps": llm.engine.limits.steps,
        "max_request_row_layers": llm.engine.limits.row_layers,
        "cache": llm.session.cache_name,
        "cache_config": llm.session.cache_config,
        "store_budget_tokens": llm.engine.memory.store_budget,
        "has_chat_template": service.intake.tokenizer.has_chat_template,
        "sampling": llm.session.merged_defaults(service.config.sampling),
    }
    return json_response(info)


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE)


def _model(service: Service, name: str) -> Model:
    """The entry of a served name, of the model or of one of its adapters. A bundled model's has its card."""
    loaded = service.llm.loaded
    adapter = loaded.adapters.get(name)
    entry: Model = {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "remask",
        "root": loaded.name if adapter is None else adapter.name,
        "parent": None if adapter is None else service.config.model_names[0],
        "max_model_len": service.llm.engine.max_model_len,
    }
    bundled = None if adapter is not None else card(loaded.name)
    if bundled is not None:
        entry["card"] = cast("ModelCard", bundled.as_json())
    return entry
