"""The state that the endpoints share: the engine, the intake, the metrics, and the way an answer is made."""

import asyncio
import functools
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from remask.answers.answer import ResponseCollector
from remask.engine.async_engine import AsyncEngine, StepObserver
from remask.engine.request import Owner, PendingRequest
from remask.engine.request import Request as EngineRequest
from remask.errors import CanvasLengthError, ConfigError, FormError, QueueFullError, RemaskError
from remask.llm import LLM
from remask.server.answers.generation import Generation, Names
from remask.server.bodies import SHORT, BodyReaders, TextWorkers
from remask.server.config import ServerConfig
from remask.server.errors import ApiError, ClientGoneError, error_response, json_response
from remask.server.intake import Intake
from remask.server.kv_events import KvEvents
from remask.server.metrics import Metrics
from remask.server.protocol.generation import GenerationBody

_LENGTH = re.compile(r"\bmax_tokens\b")  # as errors name what bodies may call otherwise
MAX_LOGGED = 256  # characters that the access log repeats of a field

Body = TypeVar("Body", bound=GenerationBody)
T = TypeVar("T")

RequestMaker: TypeAlias = Callable[[Body, str], list[EngineRequest]]
"""Makes the requests of a body, whose ids begin with the text."""


class Service:
    """One model behind HTTP. The constructor raises what `Intake` and `AsyncEngine` raise.

    `clock` tells seconds: limits of steps, and deadlines of several requests together, are read from it.
    """

    def __init__(
        self,
        llm: LLM,
        config: ServerConfig,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.llm, self.session, self.config, self.clock = llm, llm.session, config, clock
        self.intake = Intake(llm, config)
        self.metrics = Metrics(config.model_names[0])
        self.engine = AsyncEngine(
            llm.engine,
            config.max_queue,
            observer,
            self.metrics.observe,
            config.step_limit,
            config.max_client_work,
            clock=clock,
        )
        self.metrics.watch(self.engine, len(llm.loaded.adapters))
        self.started = int(time.time())
        self.token_text = functools.lru_cache(maxsize=1 << 17)(self._token_text)
        self.token_bytes = functools.lru_cache(maxsize=1 << 17)(self.intake.tokenizer.added_bytes)
        self.texts, self.bodies = TextWorkers(config.text_workers), BodyReaders(config.max_body_items)
        # Bodies that are being read or whose texts are being tokenized, or that wait for either.
        self._taking, self._long = 0, Counter[str]()  # all, and of each client those that take long
        self._kv_events = _publishing(llm, config)

    def close(self) -> None:
        """End the text threads, what reads bodies and what publishes events."""
        if self._kv_events is not None:
            self.session.engine.memory.chain.listener = None
            self._kv_events.close()
        self.texts.close()
        self.bodies.close()

    async def off_loop(self, request: Request, size: int, call: Callable[..., T], *args: Any) -> T:
        """Return what `call` returns, away from the event loop. `size` is about how many characters it works on.

        Raises `QueueFullError` where as many bodies are being worked on as requests may wait, or half as many long ones
        of this client, and `ClientGoneError` if the client disconnects first.
        """
        client = request.state.client
        return await self._away(request, lambda: self.texts.run(client, size, call, *args), long=size > SHORT)

    async def read_body(self, request: Request, model: type[BaseModel], content: bytes) -> BaseModel:
        """Return the `model` of a body, which another process reads. Raises `ApiError`, and as `off_loop` does."""
        client = request.state.client
        return await self._away(request, lambda: self.bodies.read(client, model, content), long=True)

    async def _away(self, request: Request, work: Callable[[], Coroutine[Any, Any, T]], *, long: bool) -> T:
        most, client = self.session.engine_config.max_num_seqs + self.config.max_queue, request.state.client
        if self._taking >= most:
            raise QueueFullError(
                f"the queue is full: {most} requests are being taken in, as many as may run and wait (max_num_seqs and "
                "max_queue); try again later"
            )
        if long and self._long[client] >= (half := -(-most // 2)):
            raise QueueFullError(
                f"{half} long bodies or forms of this client wait to be read; try again once some are answered"
            )
        self._taking += 1
        self._long[client] += long
        try:
            return await run_while_connected(request.receive, work())
        finally:
            self._taking -= 1
            self._long[client] -= long
            if not self._long[client]:
                del self._long[client]

    def owner(self, request: Request) -> Owner:
        """Whose turn a body takes: that of its client, and all of its choices together."""
        return Owner(request.state.client, request.state.request_id)

    def note_user(self, request: Request, user: str | None) -> None:
        """Put the user of a body into the access log."""
        if user is not None:
            request.state.log_fields["user"] = user[:MAX_LOGGED]

    def note_left_out(self, request: Request, kinds: Sequence[str]) -> None:
        """Put what was left out of a body into the access log, and into a header of its answer."""
        if kinds:
            request.state.log_fields["left_out"] = ",".join(kinds)[:MAX_LOGGED]

    async def answer(
        self, request: Request, body: Body, make: RequestMaker[Body], present: Callable[..., Generation]
    ) -> Response:
        """Run the requests that `make` builds from the body. Returns the answer as `present` tells it.

        `present` gets the arguments of `Generation`.
        """
        name, log_fields = request.state.request_id, request.state.log_fields
        self.note_user(request, body.user)
        self.note_left_out(request, body.left_out)
        priority: int | None = body.priority  # type: ignore[attr-defined]
        self.intake.check_priority(priority or 0, leads=request.state.leads)
        size = self.intake.check_size(body)
        try:
            pending = await self.off_loop(request, size, self._pending, make, body, name, self.owner(request))
        except ConfigError as error:
            text = body.form_name + error.problem if isinstance(error, FormError) else str(error)
            text = _LENGTH.sub(body.length_name, text)
            if isinstance(error, CanvasLengthError):
                # The field that takes more of the canvas.
                answer = "canvas" if body.canvas is not None else body.length_name  # type: ignore[attr-defined]
                field = answer if error.response > error.prompt else body.texts_name
                raise ApiError(400, text, field) from error
            if text == str(error):
                raise
            raise ConfigError(text) from error
        fingerprint = self.session.fingerprint_of(pending[0].request.adapter)
        model = body.model or self.config.model_names[0]
        names = Names(name, int(time.time()), model, _short_fingerprint(fingerprint), self.token_text, self.token_bytes)
        ticket = self.engine.submit(pending)
        shape, tokenizer = self.session.loaded.config, self.intake.tokenizer
        answers = [
            ResponseCollector(
                index,
                choice.request,
                tokenizer,
                shape.stop_ids,
                self.token_text if body.stream_drafts else None,
                choice.decoding.block_ranges,
                rewrites=shape.rewrites,
                scored=body.terms.top_logprobs is not None,
            )
            for index, choice in enumerate(pending)
        ]
        generation = present(ticket, answers, names, body, fingerprint, self.intake.calls(body))

        def finish() -> None:
            ticket.cancel()
            log_fields.update(_summary(generation))

        if body.stream:
            return EventStream(generation.stream(), finish)
        try:
            return json_response(await run_while_connected(request.receive, generation.response()))
        finally:
            finish()

    def _pending(self, make: RequestMaker[Body], body: Body, name: str, owner: Owner) -> list[PendingRequest]:
        """Build the requests of a body and check them.

        Raises `ConfigError` if the engine cannot run one of them, and `QueueFullError` where there is no room for all:
        after the first choice of a prompt, as the checks of many choices take long.
        """
        requests, pending = make(body, name), list[PendingRequest]()
        work = 0
        for number, request in enumerate(requests):
            pending.append(self.session.engine.check(replace(request, owner=owner)))
            if number % body.choices == 0:
                work += body.choices * pending[-1].row_layers
                self.engine.check_room(owner.client, len(requests), work)
        return pending

    def _token_text(self, token: int) -> str:
        return self.intake.tokenizer.decode([token], skip_special_tokens=False)


def _publishing(llm: LLM, config: ServerConfig) -> KvEvents | None:
    """What publishes events of the model's exact pages, if anything is to. Raises `ConfigError` where it cannot."""
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


def _short_fingerprint(fingerprint: str) -> str:
    """What answers tell of the model: its beginning, and that of an adapter after it."""
    return "fp_" + "-".join(part[:10] for part in fingerprint.split("-"))


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
    firsts = [result.first_settled_s for result in results if result.first_settled_s is not None]
    if firsts:
        fields["first_settled_ms"] = round(1e3 * min(firsts), 1)
    return fields


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns. If the client disconnects first, cancel `work` and raise `ClientGoneError`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The status goes out with the first event, so an earlier failure can have its own status.

    `finish` is called once at the end, after success and after failure.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], finish: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._finish = events, finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when the client disconnects."""
        scope["state"]["comment"] = b":\n\n"  # may stand between two events
        try:
            await run_while_connected(receive, self._pump(scope, receive, send))
        except ClientGoneError:
            pass
        finally:
            self._finish()

    async def _pump(self, scope: Scope, receive: Receive, send: Callable[[Any], Awaitable[None]]) -> None:
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
