"""The state that the endpoints share: the engine, the intake, the metrics, and the way an answer is made."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from remask.answers.answer import ResponseCollector
from remask.engine.async_engine import AsyncEngine, StepObserver
from remask.engine.request import Owner, PendingRequest
from remask.engine.request import Request as EngineRequest
from remask.errors import CanvasLengthError, ConfigError, FormError, PromptError, QueueFullError, RemaskError
from remask.llm import LLM
from remask.server.answers.generation import AnswerContext, Generation
from remask.server.bodies import SHORT_CHARS, BodyReaders, TextWorkers
from remask.server.config import ServerConfig
from remask.server.errors import ApiError, ClientGoneError, error_response, json_response
from remask.server.intake import Intake
from remask.server.kv_events import KvEvents
from remask.server.metrics import Metrics
from remask.server.protocol.generation import GenerationBody

_LENGTH = re.compile(r"\bmax_tokens\b")  # errors use this name, which bodies of other APIs do not have
MAX_LOGGED = 256  # characters that the access log repeats of a field
CACHED_TOKENS = 1 << 17  # tokens whose texts and bytes are cached: most vocabularies have about as many

Body = TypeVar("Body", bound=GenerationBody)
T = TypeVar("T")

RequestMaker: TypeAlias = Callable[[Body, str], list[EngineRequest]]
"""Makes the engine requests of a body; their ids begin with the text."""


class Service:
    """One model behind HTTP. The constructor raises what `Intake` and `AsyncEngine` raise.

    `clock` returns seconds, by which the step limit and the deadlines of bodies with several requests are checked.
    """

    def __init__(
        self,
        llm: LLM,
        config: ServerConfig,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.llm = llm
        self.session = llm.session
        self.config = config
        self.clock = clock
        self.intake = Intake(llm, config)
        self.metrics = Metrics(config.model_names[0])
        self.engine = AsyncEngine(
            llm.engine,
            config.max_queue,
            observer=observer,
            listener=self.metrics.observe,
            step_limit=config.step_limit,
            max_client_work=config.max_client_work,
            clock=clock,
        )
        self.metrics.watch(self.engine, len(llm.loaded.adapters))
        self.started = int(time.time())
        self.token_text = lru_cache(maxsize=CACHED_TOKENS)(self._token_text)
        self.token_bytes = lru_cache(maxsize=CACHED_TOKENS)(self.intake.tokenizer.added_bytes)
        self.texts = TextWorkers(config.text_workers)
        self.bodies = BodyReaders(config.max_body_items)
        # Bodies that are being read or whose texts are being tokenized, or that wait for either.
        self._open_bodies = 0
        self._long_bodies = Counter[str]()  # the long ones of each client
        self._kv_events = _start_kv_events(llm, config)

    def close(self) -> None:
        """Stop the text threads, the process that reads bodies, and the publisher of events."""
        if self._kv_events is not None:
            self.session.engine.memory.chain.listener = None
            self._kv_events.close()
        self.texts.close()
        self.bodies.close()

    async def off_loop(self, request: Request, size: int, call: Callable[..., T], *args: Any) -> T:
        """Return what `call` returns, computed on a text thread. `size` is the approximate number of its characters.

        Raises `QueueFullError` if as many bodies are being worked on as requests may run and wait, or half as many long
        ones of this client, and `ClientGoneError` if the client disconnects first.
        """
        work = partial(self.texts.run, request.state.client, size, call, *args)
        return await self._run_counted(request, work, is_long=size > SHORT_CHARS)

    async def read_body(self, request: Request, model: type[BaseModel], content: bytes) -> BaseModel:
        """Return the `model` of a body, read by another process. Raises `ApiError`, and what `off_loop` raises."""
        work = partial(self.bodies.read, request.state.client, model, content)
        return await self._run_counted(request, work, is_long=True)

    async def _run_counted(self, request: Request, work: Callable[[], Coroutine[Any, Any, T]], *, is_long: bool) -> T:
        """Return what `work` returns, counted among the open bodies. Raises what `off_loop` raises."""
        client = request.state.client
        max_open = self.session.engine_config.max_num_seqs + self.config.max_queue
        if self._open_bodies >= max_open:
            raise QueueFullError(
                f"the queue is full: {max_open} requests are being taken in, as many as may run and wait (max_num_seqs "
                "and max_queue); try again later"
            )
        max_long = -(-max_open // 2)
        if is_long and self._long_bodies[client] >= max_long:
            raise QueueFullError(
                f"{max_long} long bodies or forms of this client wait to be read; try again once some are answered"
            )
        self._open_bodies += 1
        self._long_bodies[client] += is_long
        try:
            return await run_while_connected(request.receive, work())
        finally:
            self._open_bodies -= 1
            self._long_bodies[client] -= is_long
            if not self._long_bodies[client]:
                del self._long_bodies[client]

    def owner(self, request: Request) -> Owner:
        """The owner of a body's requests: clients take turns, and the choices of one body run in one turn."""
        return Owner(request.state.client, request.state.request_id)

    def note_user(self, request: Request, user: str | None) -> None:
        """Put the user of a body into the access log."""
        if user is not None:
            request.state.log_fields["user"] = user[:MAX_LOGGED]

    def note_left_out(self, request: Request, kinds: Sequence[str]) -> None:
        """Put the kinds of what was left out of a body into the access log, and into a header of its answer."""
        if kinds:
            request.state.log_fields["left_out"] = ",".join(kinds)[:MAX_LOGGED]

    async def answer(
        self, request: Request, body: Body, make: RequestMaker[Body], present: Callable[..., Generation]
    ) -> Response:
        """Run the requests that `make` builds from `body`. Returns the answer, or a stream of it.

        `present` makes the `Generation` that writes the answer in the form of its API. Raises `ConfigError` and
        `ApiError`, which name fields as the API of the body does, and `QueueFullError`.
        """
        request_id = request.state.request_id
        log_fields = request.state.log_fields
        self.note_user(request, body.user)
        self.note_left_out(request, body.left_out)
        priority: int | None = body.priority  # type: ignore[attr-defined]
        self.intake.check_priority(priority or 0, leads=request.state.leads)
        size = self.intake.check_size(body)
        with field_names(body):
            pending = await self.off_loop(request, size, self._pending, make, body, request_id, self.owner(request))
        fingerprint = self.session.fingerprint_of(pending[0].request.adapter)
        model = body.model or self.config.model_names[0]
        created = int(time.time())
        # Of the model, and of its adapter if any.
        short_fingerprint = "fp_" + "-".join(part[:10] for part in fingerprint.split("-"))
        context = AnswerContext(request_id, created, model, short_fingerprint, self.token_text, self.token_bytes)
        ticket = self.engine.submit(pending)
        answers = self._collectors(body, pending)
        generation = present(ticket, answers, context, body, fingerprint, self.intake.calls(body))

        def finish() -> None:
            ticket.cancel()
            log_fields.update(_summary(generation))

        if body.stream:
            return EventStream(generation.stream(), finish)
        try:
            return json_response(await run_while_connected(request.receive, generation.response()))
        finally:
            finish()

    def _collectors(self, body: GenerationBody, pending: Sequence[PendingRequest]) -> list[ResponseCollector]:
        """A collector for each choice of a body, in their order."""
        model_config = self.session.loaded.config
        return [
            ResponseCollector(
                index,
                choice.request,
                self.intake.tokenizer,
                model_config.stop_ids,
                token_text=self.token_text if body.stream_drafts else None,
                blocks=choice.decoding.block_ranges,
                rewrites=model_config.rewrites,
                with_logprobs=body.terms.top_logprobs is not None,
            )
            for index, choice in enumerate(pending)
        ]

    def _pending(self, make: RequestMaker[Body], body: Body, request_id: str, owner: Owner) -> list[PendingRequest]:
        """Build the requests of a body and check them.

        Raises `ConfigError` if the engine cannot run one of them, and `QueueFullError` if it has no room for all.
        """
        requests = make(body, request_id)
        pending: list[PendingRequest] = []
        work = 0
        for index, request in enumerate(requests):
            pending.append(self.session.engine.check(replace(request, owner=owner)))
            # All choices of a prompt take the same work: a refusal must not wait for the checks of the others.
            if index % body.choices == 0:
                work += body.choices * pending[-1].row_layers
                self.engine.check_room(owner.client, len(requests), work)
        return pending

    def _token_text(self, token_id: int) -> str:
        return self.intake.tokenizer.decode([token_id], skip_special_tokens=False)


@contextmanager
def field_names(body: GenerationBody) -> Iterator[None]:
    """Rename the fields in the text of a `ConfigError` as the API of `body` names them.

    Raises `ApiError`, which names one field, if the prompt cannot be used or the canvas is too long.
    """
    try:
        yield
    except ConfigError as error:
        text = body.form_name + error.problem if isinstance(error, FormError) else str(error)
        text = _LENGTH.sub(body.length_name, text)
        if isinstance(error, PromptError):
            raise ApiError(400, text.replace("prompt_token_ids", body.texts_name), body.texts_name) from error
        if isinstance(error, CanvasLengthError):
            # Blame the field that takes more of the canvas.
            response_field = "canvas" if body.canvas is not None else body.length_name  # type: ignore[attr-defined]
            field = response_field if error.response_length > error.prompt_length else body.texts_name
            raise ApiError(400, text, field) from error
        if text == str(error):
            raise
        raise ConfigError(text) from error


def _start_kv_events(llm: LLM, config: ServerConfig) -> KvEvents | None:
    """Start publishing events of the model's exact pages. Returns None if the settings do not ask for it.

    Raises `ConfigError` if the model has no exact pages, and what `KvEvents` raises.
    """
    if config.kv_events is None or not config.kv_events.enable_kv_cache_events:
        return None
    if llm.loaded.config.kind != "block_causal":
        raise ConfigError(
            "kv_events_config: only block-causal models have pages that depend on the tokens before them alone; leave "
            "it out"
        )
    chain = llm.engine.memory.chain
    chain.listener = publisher = KvEvents(config.kv_events, chain.page_size)
    return publisher


def service_of(request: Request) -> Service:
    """The service of the application that got `request`."""
    service: Service = request.app.state.service
    return service


def _summary(generation: Generation) -> dict[str, Any]:
    """The fields of the access log that describe an answer."""
    results = list(generation.results.values())
    fields: dict[str, Any] = {
        "prompt_tokens": sum(result.usage.prompt_tokens for result in results),
        "completion_tokens": sum(result.usage.completion_tokens for result in results),
        "cached_tokens": sum(result.usage.cached_tokens for result in results),
        "finish": ",".join(result.finish_reason for result in results),
    }
    if len(results) < len(generation.answers):
        fields["unfinished"] = len(generation.answers) - len(results)
    if generation.queued_s is not None:
        fields["queued_ms"] = round(1e3 * generation.queued_s, 1)
    first_settled_s = [result.first_settled_s for result in results if result.first_settled_s is not None]
    if first_settled_s:
        fields["first_settled_ms"] = round(1e3 * min(first_settled_s), 1)
    return fields


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns. If the client disconnects first, cancel `work` and raise `ClientGoneError`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events. The status is sent with the first event, so a failure before it has its own.

    `finish` is called once at the end, after success and after failure.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], finish: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when the client disconnects."""
        scope["state"]["comment"] = b":\n\n"  # what `Exchange.comment` may send between two events
        try:
            await run_while_connected(receive, self._send_events(scope, receive, send))
        except ClientGoneError:
            pass
        finally:
            self._finish()

    async def _send_events(self, scope: Scope, receive: Receive, send: Callable[[Any], Awaitable[None]]) -> None:
        """Send the head with the first event, and then all events. Raises `RemaskError` only after the head."""
        is_open = False
        try:
            async for event in self._events:
                if not is_open:
                    is_open = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except RemaskError as error:
            if is_open:
                raise
            await error_response(error, scope)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
