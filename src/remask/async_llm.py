"""`AsyncLLM`: answers many prompts at a time on one event loop, and streams each as its text settles."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Unpack

from remask.checks.values import check_whole
from remask.engine.async_engine import AsyncEngine
from remask.engine.request import PendingRequest
from remask.errors import ConfigError
from remask.llm import LLM, Output, Sampling, StreamedOutput
from remask.session import RequestKeywords
from remask.text.prompts import Prompt


class AsyncLLM:
    """A model whose engine runs on a thread of its own, within `async with`.

    Args:
        model: the model of an `LLM`, or an `LLM`, whose engine nothing else may use meanwhile.
        max_queue: number of requests that may wait besides those that run; further ones raise `QueueFullError`.
        settings: keyword arguments of the `LLM` to be made.

    Raises the errors of `LLM`, and `ConfigError` on settings beside an `LLM`.
    """

    def __init__(self, model: str | LLM, *, max_queue: int = 256, **settings: Any) -> None:
        if isinstance(model, LLM) and settings:
            raise ConfigError(f"{next(iter(settings))}: an LLM has its settings already; leave it out")
        check_whole("max_queue", max_queue, low=0)  # before a model is loaded, which nobody would close
        self._owns_llm = not isinstance(model, LLM)
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self._engine = AsyncEngine(self.llm.engine, max_queue)
        self._was_entered = False
        self._numbers = itertools.count()

    async def __aenter__(self) -> "AsyncLLM":
        """Start the engine's thread. Raises `ConfigError` if it was entered before."""
        if self._was_entered:
            raise ConfigError("an AsyncLLM is entered once, as its thread has ended; make another one")
        self._was_entered = True
        self._engine.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Cancel requests that have not ended, end the thread, and close the `LLM` unless it was an argument."""
        await self._engine.stop()
        if self._owns_llm:
            self.llm.close()

    async def stream(
        self, prompt: Prompt, params: Sampling | None = None, **keywords: Unpack[RequestKeywords]
    ) -> AsyncGenerator[StreamedOutput, None]:
        """Answer one prompt, and yield its text as it settles, left to right, as `LLM.stream` does.

        Only the last piece has an `output`. A consumer that stops early cancels the request. Reading the first piece
        raises `ConfigError` if the prompt or a setting cannot be used, and `QueueFullError` if too many requests wait;
        reading any raises `EngineDeadError` if the engine has stopped.
        """
        pending = await asyncio.to_thread(self._check_request, prompt, params, keywords)
        collector = self.llm.session.collector(pending)
        ticket = self._engine.submit([pending])
        try:
            async for events in ticket:
                for piece in self.llm.session.collect(collector, events):
                    yield piece
        finally:
            ticket.cancel()

    async def generate(
        self, prompt: Prompt, params: Sampling | None = None, **keywords: Unpack[RequestKeywords]
    ) -> Output:
        """Answer one prompt. Arguments and errors are those of `stream`. Concurrent calls are batched together."""
        output = None
        async for piece in self.stream(prompt, params, **keywords):
            output = piece.output or output
        assert output is not None
        return output

    def _check_request(self, prompt: Prompt, params: Sampling | None, keywords: RequestKeywords) -> PendingRequest:
        request = self.llm.session.stream_request(prompt, params, **keywords)
        return self.llm.engine.check(replace(request, id=f"stream-{next(self._numbers)}"))
