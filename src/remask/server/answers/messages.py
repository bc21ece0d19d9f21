"""Answers of `/v1/messages`: Anthropic's message, and the events of its stream."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from remask.answers.answer import SettledToken
from remask.errors import RemaskError
from remask.server.answers.base import Answer, Work
from remask.server.answers.generation import AnswerPart, Events, SingleAnswer, json_event, usage
from remask.server.errors import MessagesError, messages_error


class TextContent(Answer):
    """A text."""

    type: Literal["text"]
    text: str


class CallContent(Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content: TypeAlias = TextContent | CallContent
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Answer):
    """Tokens of a message. `input_tokens` are those that were not read from the prefix store."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


class FirstUsage(Answer):
    """Tokens as they are known when the answer begins."""

    input_tokens: int
    output_tokens: Literal[0]


class _Message(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str


class MessageAnswer(_Message):
    """A message."""

    content: list[Content]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage
    remask: Work


class BegunMessage(_Message):
    """A message that has begun."""

    content: list[Content]
    stop_reason: None
    stop_sequence: None
    usage: FirstUsage


class MessageStart(Answer):
    """The first event."""

    type: Literal["message_start"]
    message: BegunMessage


class BlockStart(Answer):
    """A text or a call begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextDelta(Answer):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class InputDelta(Answer):
    """More of the text of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Answer):
    """What a step adds to a text or a call."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | InputDelta


class BlockStop(Answer):
    """A text or a call has ended."""

    type: Literal["content_block_stop"]
    index: int


class StopDelta(Answer):
    """Why the answer has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer):
    """What is known at the end."""

    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage
    remask: Work


class MessageStop(Answer):
    """The last event."""

    type: Literal["message_stop"]


MessageEvent: TypeAlias = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesError
)


class MessagesAnswer(SingleAnswer):
    """A message whose content is texts and calls, in the order in which the model wrote them."""

    def _answer_start(self) -> Events:
        usage: FirstUsage = {"input_tokens": self.answers[0].counts.given, "output_tokens": 0}
        message = self._message() | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def _part_start(self, part: AnswerPart) -> Events:
        return [self._block_event("content_block_start", content_block=_content(part))]

    def _part_delta(self, part: AnswerPart, text: str, scored_tokens: Sequence[SettledToken]) -> Events:  # noqa: ARG002
        if part.call_id is not None:
            return [self._block_event("content_block_delta", delta={"type": "input_json_delta", "partial_json": text})]
        return [self._block_event("content_block_delta", delta={"type": "text_delta", "text": text})] if text else []

    def _part_end(self, part: AnswerPart) -> Events:  # noqa: ARG002
        return [self._block_event("content_block_stop")]

    def _answer_end(self) -> Events:
        end = {"type": "message_delta", "delta": self._stop_delta(), "usage": self._usage(), "remask": self.work}
        return [end, {"type": "message_stop"}]

    def _whole_answer(self) -> Mapping[str, Any]:
        return {**self._message(), **self._stop_delta(), "usage": self._usage(), "remask": self.work}

    def _error_event(self, error: RemaskError) -> bytes:
        return json_event(messages_error(error), "error")

    def _message(self) -> dict[str, Any]:
        """The keys of a message that are known from the beginning."""
        return {
            "id": f"msg_{self.context.id}",
            "type": "message",
            "role": "assistant",
            "model": self.context.model,
            "content": [_content(part) for part in self.parts],
        }

    def _block_event(self, kind: str, **content: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self.parts) - 1, **content}

    def _stop_delta(self) -> StopDelta:
        """Why the answer has ended, in Anthropic's words, and the stop text that ended it."""
        if self.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if self.results[0].finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        text = self.answers[0].stop_text
        return {"stop_reason": "end_turn" if text is None else "stop_sequence", "stop_sequence": text}

    def _usage(self) -> MessageUsage:
        tokens = usage(self.all_results)
        cached = tokens["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": tokens["prompt_tokens"] - cached,  # Anthropic counts cached tokens apart
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens["completion_tokens"],
        }


def _content(part: AnswerPart) -> Content:
    if part.call_id is None:
        return {"type": "text", "text": part.text}
    arguments = json.loads(part.text) if part.text else {}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}
