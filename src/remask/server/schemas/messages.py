"""Answers of `/v1/messages`, the events of its stream, and its errors."""

from typing import Any, Literal, TypeAlias

from remask.server.schemas.base import Answer, Work


class MessagesErrorDetail(Answer):
    """What went wrong."""

    type: str
    message: str


class MessagesError(Answer):
    """An error, in Anthropic's form. In a stream that has begun it is the last event."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


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


class TokenCount(Answer):
    """Tokens of a conversation."""

    input_tokens: int
