"""Runs one answer: reads the engine's events and writes them in the form of an API. What all APIs have in common."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from remask.answers.answer import Delta, ResponseCollector, SettledToken
from remask.engine.async_engine import Ticket
from remask.errors import RemaskError
from remask.request.result import Event, Result
from remask.request.result import Usage as RequestUsage
from remask.server.answers.base import RunningUsage, ScoredToken, TokenScore, Usage, Work
from remask.server.errors import ApiError, error_object
from remask.server.protocol.generation import GenerationBody
from remask.server.tools import CallReader, TextPiece, ToolCalls

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

Events: TypeAlias = list[Mapping[str, Any]]
"""Objects of server-sent events."""


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What all objects of one answer repeat, and how its tokens are written.

    Attributes:
        token_text: returns the text of a token id.
        token_bytes: returns the bytes that a token adds after its predecessor, as `Tokenizer.added_bytes`.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    token_text: Callable[[int], str]
    token_bytes: Callable[[int, int | None], bytes | None]

    def unique_texts(self, settled: SettledToken) -> dict[int, str]:
        """Return a unique text for a token and for each of the most probable ones in its place, by token id.

        The text of a token is what it adds to the answer. If that is taken or a part of a character, the text spells
        the token's bytes as OpenAI's completions do, or else its id.
        """
        return self._unique_texts(self._candidate_bytes(settled), prefer_bytes=True)

    def logprobs_entry(self, settled: SettledToken) -> ScoredToken:
        """Return a token and the most probable ones in its place with their log-probabilities, for chats and responses.

        Their texts are unique as those of `unique_texts`, but a part of a character is U+FFFD if that is not taken.
        """
        contents = self._candidate_bytes(settled)
        texts = self._unique_texts(contents, prefer_bytes=False)

        def score(token: int, logprob: float) -> TokenScore:
            content = contents[token]
            return {"token": texts[token], "logprob": logprob, "bytes": None if content is None else list(content)}

        token = settled.token
        top = [score(*pair) for pair in token.top]
        return {**score(token.token_id, token.logprob), "top_logprobs": top, "step": token.step}

    def _candidate_bytes(self, settled: SettledToken) -> dict[int, bytes | None]:
        """The bytes of a token and of the most probable ones in its place, by token id; None if they are unknown."""
        candidates = (settled.token.token_id, *(token for token, _ in settled.token.top))
        return {token: self.token_bytes(token, settled.predecessor) for token in candidates}

    def _unique_texts(self, contents: Mapping[int, bytes | None], *, prefer_bytes: bool) -> dict[int, str]:
        """The first spelling of each token that no token before it has. `prefer_bytes` is for parts of characters."""
        texts: dict[int, str] = {}
        for token, content in contents.items():
            text = content.decode(errors="replace") if content else self.token_text(token)
            spellings = [text, f"token_id:{token}"]
            if content and content != text.encode():
                escapes = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
                spellings.insert(0 if prefer_bytes else 1, escapes)
            texts[token] = next(spelling for spelling in spellings if spelling not in texts.values())
        return texts


class Generation(ABC):
    """The choices of one request body while they run. `results` maps the index of a finished choice to its result."""

    def __init__(
        self,
        ticket: Ticket,
        answers: Sequence[ResponseCollector],
        context: AnswerContext,
        body: GenerationBody,
        fingerprint: str,
        calls: ToolCalls | None = None,
    ) -> None:
        self.ticket = ticket
        self.answers = answers
        self.context = context
        self.body = body
        self.fingerprint = fingerprint
        self.terms = body.terms
        self.results: dict[int, Result] = {}
        self.queued_s: float | None = None
        self._by_id = {answer.request.id: answer for answer in answers}
        self._readers = [] if calls is None else [CallReader(calls) for _ in answers]

    @property
    def all_results(self) -> list[Result]:
        """The results of all choices, in their order. Raises `KeyError` if one still runs."""
        return [self.results[index] for index in range(len(self.answers))]

    @property
    def work(self) -> Work:
        """The work of all choices, and what was left out of the request."""
        return work(self.all_results, self.body.left_out)

    @property
    def has_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities."""
        return self.terms.top_logprobs is not None

    @abstractmethod
    async def response(self) -> Mapping[str, Any]:
        """Return the whole answer. Raises `RemaskError` if a choice fails."""

    @abstractmethod
    def _first_events(self) -> list[bytes]:
        """The events that a stream begins with."""

    @abstractmethod
    def _delta_events(self, delta: Delta) -> list[bytes]:
        """The events of what one engine step added to a choice."""

    @abstractmethod
    def _last_events(self) -> list[bytes]:
        """The events that a stream ends with."""

    @abstractmethod
    def _error_event(self, error: RemaskError) -> bytes:
        """The last event of a stream that fails with `error` after it has begun."""

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events. All events of one engine step are one piece, as each piece costs a send.

        Raises the exception of a failure before the first event. A later failure becomes an event.
        """
        has_begun = False
        try:
            async for deltas in self._steps():
                events = [] if has_begun else self._first_events()
                has_begun = True
                for delta in deltas:
                    events += self._delta_events(delta)
                if len(self.results) == len(self.answers):
                    events += self._last_events()
                if events:
                    yield b"".join(events)
        except RemaskError as error:
            if not has_begun:
                raise
            yield self._error_event(error)
        # A defect, such as one of a tokenizer: a stream that has begun still ends with an error.
        except Exception as error:
            if not has_begun:
                raise
            log.error("a stream failed: %s", error, exc_info=True)
            yield self._error_event(ApiError(500, "the server failed; its log says why"))

    async def _steps(self) -> AsyncIterator[list[Delta]]:
        """Yield what each engine step adds to the choices. Raises `ApiError` once a choice ends without an answer."""
        async for events in self.ticket:
            by_request: dict[str, list[Event]] = {}
            for event in events:
                by_request.setdefault(event.id, []).append(event)
                if event.queued_s is not None:
                    self.queued_s = max(self.queued_s or 0.0, event.queued_s)
            deltas = [self._by_id[name].apply(group) for name, group in by_request.items()]
            for delta in deltas:
                if delta.result is not None:
                    self.results[delta.index] = delta.result
                    check_end(delta.result)
            yield [part for delta in deltas for part in self._split(delta)] if self._readers else deltas

    def _split(self, delta: Delta) -> list[Delta]:
        """Read the calls in the text of `delta`. Returns a delta for each text and call, in the answer's order."""
        index = delta.index
        deltas: list[Delta] = []
        for piece in self._readers[index].read(delta.text, delta.scored_tokens, final=delta.result is not None):
            if isinstance(piece, TextPiece):
                deltas.append(Delta(index, piece.text, scored_tokens=piece.scored_tokens))
            else:
                deltas.append(Delta(index, calls=[piece]))
        # Pieces are held back until they are certain, so none has tokens of its own: the last delta has all of the
        # step. It also has the result, as nothing may follow that.
        last = replace(
            deltas.pop() if deltas else Delta(index), tokens=delta.tokens, canvas=delta.canvas, result=delta.result
        )
        return [*deltas, last]


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer: a text, or a call of the tool `name` with its arguments as `text`."""

    call_id: str | None = None
    name: str = ""
    text: str = ""
    logprobs: list[ScoredToken] = field(default_factory=list)


class SingleAnswer(Generation):
    """Writes one choice as a sequence of parts. The whole answer is what the events of its stream make up.

    A part begins when the one before it has ended. Text of white space alone is left out unless nothing else follows.
    Subclasses define the events of each of these moments, and `_whole_answer`, the answer once it has ended.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts: list[AnswerPart] = []
        self._part_is_open = False  # the last part may go on
        self._pending_text = ""  # not in a part yet
        self._pending_tokens: list[SettledToken] = []

    @abstractmethod
    def _answer_start(self) -> Events: ...

    @abstractmethod
    def _part_start(self, part: AnswerPart) -> Events: ...

    @abstractmethod
    def _part_delta(self, part: AnswerPart, text: str, scored_tokens: Sequence[SettledToken]) -> Events: ...

    @abstractmethod
    def _part_end(self, part: AnswerPart) -> Events: ...

    @abstractmethod
    def _answer_end(self) -> Events: ...

    @abstractmethod
    def _whole_answer(self) -> Mapping[str, Any]: ...

    async def response(self) -> Mapping[str, Any]:
        async for deltas in self._steps():
            for delta in deltas:
                self._add_delta(delta)
        return self._whole_answer()

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a tool."""
        return any(part.call_id is not None for part in self.parts)

    def _first_events(self) -> list[bytes]:
        return [self._encode(event) for event in self._answer_start()]

    def _delta_events(self, delta: Delta) -> list[bytes]:
        return [self._encode(event) for event in self._add_delta(delta)]

    def _last_events(self) -> list[bytes]:
        return []

    def _encode(self, event: Mapping[str, Any]) -> bytes:
        return json_event(event, event["type"])

    def _add_delta(self, delta: Delta) -> Events:
        """Add what a step wrote to the parts. Returns the events that report it."""
        self._pending_text += delta.text
        self._pending_tokens += delta.scored_tokens
        events = self._flush_text() if self._in_text or self._pending_text.strip() else []
        for call in delta.calls:
            self._pending_text = ""
            self._pending_tokens = []
            if call.id is not None:
                events += self._begin_part(AnswerPart(call.id, str(call.name)))
            if call.arguments:
                events += self._extend_part(call.arguments, ())
        if delta.result is not None:
            if not self.parts:
                events += self._flush_text()
            events += self._end_part() + self._answer_end()
        return events

    @property
    def _in_text(self) -> bool:
        return self._part_is_open and self.parts[-1].call_id is None

    def _flush_text(self) -> Events:
        """Move the pending text into the open part, or into a new one. Returns the events that report it."""
        events = [] if self._in_text else self._begin_part(AnswerPart())
        if self._pending_text or self._pending_tokens:
            events += self._extend_part(self._pending_text, self._pending_tokens)
        self._pending_text = ""
        self._pending_tokens = []
        return events

    def _begin_part(self, part: AnswerPart) -> Events:
        events = self._end_part()
        self.parts.append(part)
        self._part_is_open = True
        return events + self._part_start(part)

    def _extend_part(self, text: str, scored_tokens: Sequence[SettledToken]) -> Events:
        part = self.parts[-1]
        part.text += text
        return self._part_delta(part, text, scored_tokens)

    def _end_part(self) -> Events:
        if not self._part_is_open:
            return []
        self._part_is_open = False
        return self._part_end(self.parts[-1])


def usage(results: Sequence[Result], choices: int = 1) -> Usage:
    """OpenAI's usage of one answer. `results` are in order, with `choices` for each prompt, whose tokens count once."""
    by_prompt = results[::choices]
    prompt_tokens = sum(result.usage.prompt_tokens for result in by_prompt)
    completion_tokens = sum(result.usage.completion_tokens for result in results)
    cached_tokens = sum(result.usage.cached_tokens for result in by_prompt)
    return {
        **running_usage(prompt_tokens, completion_tokens),
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def running_usage(prompt_tokens: int, completion_tokens: int) -> RunningUsage:
    """The part of OpenAI's usage that is known while an answer is written."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def work(results: Sequence[Result], left_out: Sequence[str] = ()) -> Work:
    """The work of an answer: the object `remask`, which OpenAI's API does not have."""
    total = RequestUsage.total([result.usage for result in results])
    fields = {name: value for name in Work.__annotations__ if (value := getattr(total, name, None)) is not None}
    return cast("Work", fields | ({"left_out": list(left_out)} if left_out else {}))


def failed_stream(error: RemaskError) -> bytes:
    """The last events of a stream of chat or text completions that fails with `error`."""
    return json_event(error_object(error)) + DONE


def json_event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event with JSON data, and a name if given."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def check_end(result: Result) -> None:
    """Raise `ApiError` if a request ended without an answer: a 500, 504 or 503."""
    if result.finish_reason == "error":
        raise ApiError(500, f"the request failed: {result.error}")
    if result.finish_reason == "timeout":
        raise ApiError(504, "the request did not end within its deadline_s; give it more time, or try again later")
    if result.finish_reason == "cancelled":
        raise ApiError(503, "the server stopped before the request had ended; send it to another one")
