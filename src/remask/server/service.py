"""The state that the endpoints share: the engine, the intake, the metrics, and the way an answer is made."""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request, Response

from remask.engine import request as engine_request
from remask.engine.async_engine import AsyncEngine, StepObserver
from remask.engine.pending import PendingRequest
from remask.llm import LLM
from remask.server.answer import Answer
from remask.server.config import ServerConfig
from remask.server.errors import json_response
from remask.server.generation import Generation, Shape
from remask.server.intake import Intake
from remask.server.metrics import Metrics
from remask.server.protocol import GenerationBody
from remask.server.responses import CLOSED_BY_CLIENT, ClientGoneError, EventStream, run_while_connected
from remask.server.shapes import Names

MAX_LOGGED_USER = 256  # characters of the field `user` that the access log repeats

Body = TypeVar("Body", bound=GenerationBody)
T = TypeVar("T")


class Service:
    """One model behind HTTP. The constructor raises what `Intake` and `AsyncEngine` raise."""

    def __init__(self, llm: LLM, config: ServerConfig, observer: StepObserver | None = None) -> None:
        self.llm, self.config = llm, config
        self.intake = Intake(llm, config)
        self.metrics = Metrics(config.model_names[0])
        self.engine = AsyncEngine(llm.engine, config.max_queue, observer, self.metrics.observe, config.step_limit)
        self.metrics.watch(self.engine)
        self.started = int(time.time())
        self.token_text = functools.lru_cache(maxsize=1 << 17)(self._token_text)
        # Tokenizers may be slow on long texts, and are not thread-safe.
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="remask-text")

    def close(self) -> None:
        """End the tokenizer thread."""
        self._tokenizer_thread.shutdown()

    async def off_loop(self, call: Callable[..., T], *args: Any) -> T:
        """Run a call in the tokenizer thread, away from the event loop. Returns what the call returns."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, call, *args)

    async def answer(
        self,
        request: Request,
        body: Body,
        make: Callable[[Body, str], list[engine_request.Request]],
        shape: Callable[[Names], Shape],
    ) -> Response:
        """Run the requests that `make` builds from the body. Returns the answer in the format `shape`."""
        name, log_fields = request.state.request_id, request.state.log_fields
        if body.user is not None:
            log_fields["user"] = body.user[:MAX_LOGGED_USER]
        pending = await self.off_loop(self._checked, make, body, name)
        names = Names(
            name, int(time.time()), body.model or self.config.model_names[0], self._fingerprint, self.token_text
        )
        ticket = self.engine.submit(pending)
        token_text = self.token_text if body.stream_drafts else None
        stops = self.llm.loaded.config.stop_ids
        kind = {"rewrites": self.llm.loaded.config.kind == "uniform", "scored": body.wants_logprobs}
        texts = self.intake.tokenizer
        answers = [Answer(i, each.request, texts, stops, token_text, **kind) for i, each in enumerate(pending)]
        generation = Generation(ticket, answers, shape(names), body)

        def finish() -> None:
            ticket.cancel()
            log_fields.update(_summary(generation))

        if body.stream:
            return EventStream(generation.stream(), finish)
        try:
            return json_response(await run_while_connected(request.receive, generation.response()))
        except ClientGoneError:
            return Response(status_code=CLOSED_BY_CLIENT)
        finally:
            finish()

    def _checked(
        self, make: Callable[[Body, str], list[engine_request.Request]], body: Body, name: str
    ) -> list[PendingRequest]:
        """Build the requests of a body and check them. Raises `ConfigError` if the engine cannot run one of them."""
        return [self.llm.engine.check(request) for request in make(body, name)]

    @property
    def _fingerprint(self) -> str:
        return f"fp_{self.llm.loaded.fingerprint[:10]}"

    def _token_text(self, token: int) -> str:
        return self.intake.tokenizer.decode([token], skip_special_tokens=False)


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
