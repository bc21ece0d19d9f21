"""What the endpoints share: the engine, the intake, the metrics, and how an answer is made."""

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
from remask.server.responses import CLOSED_BY_CLIENT, ClientGoneError, EventStream, unless_gone
from remask.server.shapes import Names

LOGGED = 256  # characters of what a client says of itself that the access log repeats

Body = TypeVar("Body", bound=GenerationBody)
T = TypeVar("T")


class Service:
    """One model behind HTTP. Raises what `Intake` and `AsyncEngine` raise when made."""

    def __init__(self, llm: LLM, config: ServerConfig, observer: StepObserver | None = None) -> None:
        self.llm, self.config = llm, config
        self.intake = Intake(llm, config)
        self.metrics = Metrics(config.model_names[0])
        self.engine = AsyncEngine(llm.engine, config.max_queue, observer, self.metrics.observe)
        self.metrics.watch(self.engine)
        self.started = int(time.time())
        self.token_text = functools.lru_cache(maxsize=1 << 17)(self._token_text)
        # Tokenizers may be slow on long texts, and are not made for many threads at once.
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="remask-text")

    def close(self) -> None:
        """End the thread that reads texts."""
        self._texts.shutdown()

    async def off_loop(self, act: Callable[..., T], *args: Any) -> T:
        """What `act` returns, run on the one thread that reads texts."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, act, *args)

    async def answer(
        self,
        request: Request,
        body: Body,
        make: Callable[[Body, str], list[engine_request.Request]],
        shape: Callable[[Names], Shape],
    ) -> Response:
        """Run what `make` makes of the body, and word the outcome in `shape`."""
        name, note = request.state.request_id, request.state.note
        if body.user is not None:
            note["user"] = body.user[:LOGGED]
        pending = await self.off_loop(self._checked, make, body, name)
        names = Names(
            name, int(time.time()), body.model or self.config.model_names[0], self._fingerprint, self.token_text
        )
        ticket = self.engine.submit(pending)
        shown = self.token_text if body.stream_drafts else None
        stops = self.llm.loaded.config.stop_ids
        kind = {"rewrites": self.llm.loaded.config.kind == "uniform", "scored": body.wants_logprobs}
        texts = self.intake.tokenizer
        answers = [Answer(i, each.request, texts, stops, shown, **kind) for i, each in enumerate(pending)]
        generation = Generation(ticket, answers, shape(names), body)

        def finish() -> None:
            ticket.cancel()
            note.update(_summary(generation))

        if body.stream:
            return EventStream(generation.stream(), finish)
        try:
            return json_response(await unless_gone(request.receive, generation.response()))
        except ClientGoneError:
            return Response(status_code=CLOSED_BY_CLIENT)
        finally:
            finish()

    def _checked(
        self, make: Callable[[Body, str], list[engine_request.Request]], body: Body, name: str
    ) -> list[PendingRequest]:
        """The requests that `make` makes of the body, checked. Raises `ConfigError` where one of them cannot run."""
        return [self.llm.engine.check(request) for request in make(body, name)]

    @property
    def _fingerprint(self) -> str:
        return f"fp_{self.llm.loaded.fingerprint[:10]}"

    def _token_text(self, token: int) -> str:
        return self.intake.tokenizer.decode([token], skip_special_tokens=False)


def _summary(generation: Generation) -> dict[str, Any]:
    """What the access log tells of an answer."""
    results = list(generation.results.values())
    told: dict[str, Any] = {
        "prompt_tokens": sum(result.usage.prompt_tokens for result in results),
        "completion_tokens": sum(result.usage.completion_tokens for result in results),
        "cached_tokens": sum(result.usage.cached_tokens for result in results),
        "finish": ",".join(result.finish_reason for result in results),
    }
    if len(results) < len(generation.answers):
        told["unfinished"] = len(generation.answers) - len(results)
    if generation.queued_s is not None:
        told["queued_ms"] = round(1e3 * generation.queued_s, 1)
    firsts = [result.first_settled_s for result in results if result.first_settled_s is not None]
    if firsts:
        told["first_settled_ms"] = round(1e3 * min(firsts), 1)
    return told
