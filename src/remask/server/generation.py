"""Runs one answer: reads the engine's events and makes the objects of an API of them."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from remask.answers.answer import Answer, Delta, Scored
from remask.answers.rollout import trace_of
from remask.engine.async_engine import Ticket
from remask.errors import RemaskError
from remask.request.result import Event, Result
from remask.request.trace import step_map
from remask.server.errors import ApiError, error_object
from remask.server.protocol.generation import GenerationBody
from remask.server.shapes import Json, Names, usage, work
from remask.server.tools import CallPiece, ToolCalls

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """The format of an endpoint's JSON objects."""

    def opening(self, index: int) -> Json | None:
        """The choice that a stream begins with; None if it begins with none."""

    def part(self, delta: Delta, logprobs: bool) -> Json:
        """A choice that carries settled text."""

    def end(self, index: int, finish: str) -> Json:
        """The choice that carries the finish reason."""

    def whole(
        self,
        index: int,
        text: str,
        scored: Sequence[Scored],
        finish: str,
        logprobs: bool,
        calls: Sequence[CallPiece] = (),
    ) -> Json:
        """A choice that is not streamed."""

    def chunk(self, choices: list[Json]) -> Json:
        """A chunk of a stream."""

    def response(self, choices: list[Json]) -> Json:
        """An answer that is not streamed."""

    def add_prompts(self, answer: Json, prompts: list[list[int]]) -> None:
        """Put the token ids of each choice's prompt where vLLM puts them."""


class Generation(ABC):
    """The choices of one request body while they run. `results` maps the index of a finished choice to its result."""

    def __init__(
        self,
        ticket: Ticket,
        answers: Sequence[Answer],
        names: Names,
        body: GenerationBody,
        fingerprint: str,
        calls: ToolCalls | None = None,
    ) -> None:
        self.ticket, self.answers, self.names, self.body, self.fingerprint = ticket, answers, names, body, fingerprint
        self.terms = body.terms
        self.results: dict[int, Result] = {}
        self.queued_s: float | None = None
        self._by_id = {answer.request.id: answer for answer in answers}
        self._readers = [] if calls is None else [calls.reader() for _ in answers]

    @property
    def ordered(self) -> list[Result]:
        """All results, in the order of the choices."""
        return [self.results[index] for index in range(len(self.answers))]

    @abstractmethod
    async def response(self) -> Json:
        """Return the whole answer. Raises `RemaskError` if a choice fails."""

    @abstractmethod
    def _opening(self) -> list[bytes]:
        """The events that a stream begins with."""

    @abstractmethod
    def _chunks(self, delta: Delta) -> list[bytes]:
        """The events of what one engine step added to a choice."""

    @abstractmethod
    def _closing(self) -> list[bytes]:
        """The events that a stream ends with."""

    @abstractmethod
    def _failed(self, error: RemaskError) -> bytes:
        """How a stream that has begun ends with `error`."""

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events. All events of one engine step are one piece, as each piece costs a send.

        Raises `RemaskError` for a failure before the first event. A later failure becomes an event.
        """
        opened = False
        try:
            async for deltas in self._steps():
                chunks = [] if opened else self._opening()
                opened = True
                for delta in deltas:
                    chunks += self._chunks(delta)
                if len(self.results) == len(self.answers):
                    chunks += self._closing()
                if chunks:
                    yield b"".join(chunks)
        except RemaskError as error:
            if not opened:
                raise
            yield self._failed(error)
        # A defect, such as one of a tokenizer: a stream that has begun still ends with an error.
        except Exception as error:
            if not opened:
                raise
            log.error("a stream failed: %s", error, exc_info=True)
            yield self._failed(ApiError(500, "the server failed; its log says why"))

    async def _steps(self) -> AsyncIterator[list[Delta]]:
        async for events in self.ticket:
            by_request: dict[str, list[Event]] = {}
            for event in events:
                by_request.setdefault(event.id, []).append(event)
                if event.queued_s is not None:
                    self.queued_s = max(self.queued_s or 0.0, event.queued_s)
            deltas = [self._by_id[name].take(group) for name, group in by_request.items()]
            for delta in deltas:
                if delta.result is not None:
                    self.results[delta.index] = delta.result
                    check_end(delta.result)
                if self._readers:
                    final = delta.result is not None
                    delta.text, delta.calls = self._readers[delta.index].read(delta.text, final=final)
            yield deltas

    def _finish(self, index: int) -> str:
        """Why a choice has ended, in the words of OpenAI's chat completions."""
        reason = self.results[index].finish_reason
        return self._readers[index].finish_reason(reason) if self._readers else reason


class Choices(Generation):
    """An answer as OpenAI's chat and text completions tell it: choices in the format `shape`.

    The other arguments are those of `Generation`.
    """

    def __init__(self, *told: Any, shape: Callable[[Names], Shape]) -> None:
        super().__init__(*told)
        self.shape = shape(self.names)

    async def response(self) -> Json:
        """Return the whole answer. Raises `RemaskError` if a choice fails."""
        texts = [""] * len(self.answers)
        scored: list[list[Scored]] = [[] for _ in self.answers]
        calls: list[list[CallPiece]] = [[] for _ in self.answers]
        async for deltas in self._steps():
            for delta in deltas:
                texts[delta.index] += delta.text
                scored[delta.index] += delta.scored
                calls[delta.index] += delta.calls
        choices = [
            self.shape.whole(i, texts[i], scored[i], self._finish(i), self._wants_logprobs, calls[i]) | self._extras(i)
            for i in range(len(self.answers))
        ]
        if self.body.return_token_ids:
            for choice, answer, result in zip(choices, self.answers, self.ordered, strict=True):
                shown = answer.request.response.shown(len(result.token_ids))
                choice["token_ids"] = [result.token_ids[place] for place in shown]
        return {
            **self._with_prompts(self.shape.response(choices)),
            "usage": self._usage(),
            "remask": work(self.ordered),
        }

    @property
    def _wants_logprobs(self) -> bool:
        return self.terms.top_logprobs is not None

    def _extras(self, index: int) -> Json:
        """What a choice carries beside OpenAI's keys once it has ended: the texts of its canvas' holes, its step maps
        and its trace, if asked for.
        """
        request, result, told = self.answers[index].request, self.results[index], Json()
        if self.terms.return_step_maps:
            steps = step_map(result.trace, len(request.prompt_token_ids), len(result.token_ids))
            told["step_maps"] = [steps[place] for place in request.response.shown(len(steps))]
        if self.terms.return_trace:
            told["trace"] = trace_of(request, result.trace, result.usage, self.fingerprint).content
        holes = self.answers[index].holes
        return ({} if holes is None else {"holes": holes}) | ({"remask": told} if told else {})

    def _with_prompts(self, answer: Json) -> Json:
        """`answer`, or the first chunk of a stream, with the prompts' token ids where they are asked for."""
        if self.body.return_token_ids:
            self.shape.add_prompts(answer, [list(each.request.prompt_token_ids) for each in self.answers])
        return answer

    @property
    def _include_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def _usage(self) -> Json:
        return usage(self.ordered, self.body.n or 1)

    def _opening(self) -> list[bytes]:
        choices = [self.shape.opening(answer.index) for answer in self.answers]
        chunks = [self.shape.chunk([choice]) for choice in choices if choice is not None]
        if self.body.return_token_ids:
            empty = [self.shape.part(Delta(answer.index), False) for answer in self.answers]
            chunks.append(self._with_prompts(self.shape.chunk(empty)))
        if self.body.stream_drafts:
            layout = {
                "prompts": [answer.prompt for answer in self.answers],
                "blocks": [answer.blocks for answer in self.answers],
            }
            chunks.append({**self.shape.chunk([]), "remask": layout})
        return [self._chunk(chunk) for chunk in chunks]

    def _closing(self) -> list[bytes]:
        if not self._include_usage:
            return [DONE]
        return [json_event({**self.shape.chunk([]), "usage": self._usage(), "remask": work(self.ordered)}), DONE]

    def _chunks(self, delta: Delta) -> list[bytes]:
        chunks = []
        told = delta.tokens and (self._wants_logprobs or self.body.return_token_ids)
        if delta.text or delta.calls or told or delta.canvas is not None:
            choice = self.shape.part(delta, self._wants_logprobs)
            if self.body.return_token_ids:
                choice["token_ids"] = delta.tokens
            shown = {} if delta.canvas is None else {"remask": {"index": delta.index, **delta.canvas}}
            chunks.append({**self.shape.chunk([choice]), **shown})
        if delta.result is not None:
            chunks.append(
                self.shape.chunk([self.shape.end(delta.index, self._finish(delta.index)) | self._extras(delta.index)])
            )
        return [self._chunk(chunk) for chunk in chunks]

    def _chunk(self, chunk: Json) -> bytes:
        # With `include_usage`, all of OpenAI's chunks have the key `usage`; only the last one has a value.
        return json_event({**chunk, "usage": None} if self._include_usage else chunk)

    def _failed(self, error: RemaskError) -> bytes:
        return failed_stream(error)


def failed_stream(error: RemaskError) -> bytes:
    """How a stream that has begun ends with `error`."""
    return json_event(error_object(error)) + DONE


def json_event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event that carries JSON, with a name where it has one."""
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def check_end(result: Result) -> None:
    """Raise `ApiError` if a request ended without an answer."""
    if result.finish_reason == "error":
        raise ApiError(500, f"the request failed: {result.error}")
    if result.finish_reason == "timeout":
        raise ApiError(504, "the request did not end within its deadline_s; give it more time, or try again later")
    if result.finish_reason == "cancelled":
        raise ApiError(503, "the server stopped before the request had ended; send it to another one")
