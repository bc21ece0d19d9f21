"""Runs one answer: reads the engine's events, and tells them as an API does; and what all APIs tell alike."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from remask.answers.answer import Delta, ResponseCollector, Scored
from remask.engine.async_engine import Ticket
from remask.errors import RemaskError
from remask.request.result import Event, Result
from remask.request.result import Usage as RequestUsage
from remask.server.answers.base import RunningUsage, ScoredToken, TokenScore, Usage, Work
from remask.server.errors import ApiError, error_object
from remask.server.protocol.generation import GenerationBody
from remask.server.tools import CallReader, ToolCalls

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

Events: TypeAlias = list[Mapping[str, Any]]
"""Objects of server-sent events."""


@dataclass(frozen=True, slots=True)
class Names:
    """What all objects of one answer repeat."""

    id: str
    created: int
    model: str
    fingerprint: str
    token_text: Callable[[int], str]
    token_bytes: Callable[[int, int | None], bytes | None]

    def spelled(self, item: Scored, *, partial: bool = True) -> dict[int, str]:
        """What a token and the most probable ones in its place are called: by what they add to the text there.

        With `partial` one that is a part of a character is spelled by its bytes, as OpenAI's completions write them.
        Each has a name of its own: where one is taken, the next is called by its bytes or its number.
        """
        names: dict[int, str] = {}
        for token in (item.read.token_id, *(token for token, _ in item.read.top)):
            content = self.token_bytes(token, item.before)
            text = content.decode(errors="replace") if content else self.token_text(token)
            spelled = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content or ())
            choices = [text, f"token_id:{token}"]
            if content and content != text.encode():
                choices = [spelled, *choices] if partial else [text, spelled, choices[1]]
            names.setdefault(token, next(name for name in choices if name not in names.values()))
        return names

    def scored(self, item: Scored) -> ScoredToken:
        """A token with its log-probability, and those of the most probable ones, as chats and responses tell them."""
        names = self.spelled(item, partial=False)

        def score(token: int, logprob: float) -> TokenScore:
            content = self.token_bytes(token, item.before)
            return {"token": names[token], "logprob": logprob, "bytes": None if content is None else list(content)}

        chosen = score(item.read.token_id, item.read.logprob)
        return {**chosen, "top_logprobs": [score(*pair) for pair in item.read.top], "step": item.read.step}


class Generation(ABC):
    """The choices of one request body while they run. `results` maps the index of a finished choice to its result."""

    def __init__(
        self,
        ticket: Ticket,
        answers: Sequence[ResponseCollector],
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
        self._readers = [] if calls is None else [CallReader(calls) for _ in answers]

    @property
    def ordered(self) -> list[Result]:
        """All results, in the order of the choices."""
        return [self.results[index] for index in range(len(self.answers))]

    @property
    def work(self) -> Work:
        """The work of all choices, and what was left out of the request."""
        return work(self.ordered, self.body.left_out)

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.terms.top_logprobs is not None

    @abstractmethod
    async def response(self) -> Mapping[str, Any]:
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
    def _failure(self, error: RemaskError) -> bytes:
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
            yield self._failure(error)
        # A defect, such as one of a tokenizer: a stream that has begun still ends with an error.
        except Exception as error:
            if not opened:
                raise
            log.error("a stream failed: %s", error, exc_info=True)
            yield self._failure(ApiError(500, "the server failed; its log says why"))

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


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer: a text, or a call of the tool `name`, whose `text` are its arguments."""

    call_id: str | None = None
    name: str = ""
    text: str = ""
    logprobs: list[ScoredToken] = field(default_factory=list)


class SingleAnswer(Generation):
    """Tells one choice as a sequence of parts. The whole answer is what the events of its stream make up.

    A part begins when the one before it has ended. White space alone is told where nothing else comes. Subclasses have
    the events of each of these moments, and `_whole`, the answer once it has ended.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts: list[AnswerPart] = []
        self._open = False  # whether the last of them goes on
        self._waiting, self._waiting_scores = "", list[Scored]()  # what is not told yet

    @abstractmethod
    def _begins(self) -> Events: ...

    @abstractmethod
    def _part_begins(self, part: AnswerPart) -> Events: ...

    @abstractmethod
    def _part_goes_on(self, part: AnswerPart, text: str, scored: Sequence[Scored]) -> Events: ...

    @abstractmethod
    def _part_ends(self, part: AnswerPart) -> Events: ...

    @abstractmethod
    def _ends(self) -> Events: ...

    @abstractmethod
    def _whole(self) -> Mapping[str, Any]: ...

    async def response(self) -> Mapping[str, Any]:
        async for deltas in self._steps():
            for delta in deltas:
                self._events(delta)
        return self._whole()

    @property
    def called(self) -> bool:
        """Whether it has called a tool."""
        return any(part.call_id is not None for part in self.parts)

    def _opening(self) -> list[bytes]:
        return [self._encode(event) for event in self._begins()]

    def _chunks(self, delta: Delta) -> list[bytes]:
        return [self._encode(event) for event in self._events(delta)]

    def _closing(self) -> list[bytes]:
        return []

    def _encode(self, event: Mapping[str, Any]) -> bytes:
        return json_event(event, event["type"])

    def _events(self, delta: Delta) -> Events:
        self._waiting += delta.text
        self._waiting_scores += delta.scored
        events = self._tell_text() if self._in_text or self._waiting.strip() else []
        for piece in delta.calls:
            self._waiting = ""
            if piece.id is not None:
                events += self._begin(AnswerPart(piece.id, str(piece.name)))
            if piece.arguments:
                events += self._add(piece.arguments, ())
        if delta.result is not None:
            events += ([] if self.parts else self._tell_text()) + self._end() + self._ends()
        return events

    @property
    def _in_text(self) -> bool:
        return self._open and self.parts[-1].call_id is None

    def _tell_text(self) -> Events:
        events = [] if self._in_text else self._begin(AnswerPart())
        if self._waiting or self._waiting_scores:
            events += self._add(self._waiting, self._waiting_scores)
        self._waiting, self._waiting_scores = "", []
        return events

    def _begin(self, part: AnswerPart) -> Events:
        events = self._end()
        self.parts.append(part)
        self._open = True
        return events + self._part_begins(part)

    def _add(self, text: str, scored: Sequence[Scored]) -> Events:
        part = self.parts[-1]
        part.text += text
        return self._part_goes_on(part, text, scored)

    def _end(self) -> Events:
        was_open, self._open = self._open, False
        return self._part_ends(self.parts[-1]) if was_open else []


def usage(results: Sequence[Result], choices: int = 1) -> Usage:
    """OpenAI's usage of one answer; `results` are in order, `choices` of them to a prompt, which counts once."""
    prompts = results[::choices]
    prompt = sum(result.usage.prompt_tokens for result in prompts)
    completion = sum(result.usage.completion_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in prompts)
    return {**running_usage(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}


def running_usage(prompt: int, completion: int) -> RunningUsage:
    """What of OpenAI's usage is known while an answer is written."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def work(results: Sequence[Result], left_out: Sequence[str] = ()) -> Work:
    """The work of an answer, for which OpenAI's API has no fields."""
    total = RequestUsage.total([result.usage for result in results])
    fields = {name: value for name in Work.__annotations__ if (value := getattr(total, name, None)) is not None}
    return cast("Work", fields | ({"left_out": list(left_out)} if left_out else {}))


def failed_stream(error: RemaskError) -> bytes:
    """How a stream in OpenAI's older form that has begun ends with `error`."""
    return json_event(error_object(error)) + DONE


def json_event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event that carries JSON, with a name where it has one."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def check_end(result: Result) -> None:
    """Raise `ApiError` if a request ended without an answer."""
    if result.finish_reason == "error":
        raise ApiError(500, f"the request failed: {result.error}")
    if result.finish_reason == "timeout":
        raise ApiError(504, "the request did not end within its deadline_s; give it more time, or try again later")
    if result.finish_reason == "cancelled":
        raise ApiError(503, "the server stopped before the request had ended; send it to another one")
