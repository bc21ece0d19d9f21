"""Answers of `/v1/responses`, and the events of its stream."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from remask.server.schemas.base import Answer, CachedTokens, ErrorDetail, ScoredToken, Work, left_out

Status: TypeAlias = Literal["in_progress", "completed"]


class OutputText(Answer):
    """A text."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[ScoredToken]


class OutputMessage(Answer):
    """A message."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Answer):
    """A call of a function. `arguments` are the text of a JSON object."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = OutputMessage | OutputCall


class CutReason(Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class NoReasoning(Answer):
    """No served model marks a part of its answer as reasoning."""

    effort: None
    summary: None


class AskedFormat(Answer):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = left_out()
    description: str = left_out()
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = left_out()


class AskedText(Answer):
    """How the answer is written."""

    format: AskedFormat


class AskedFunction(Answer):
    """The choice of one function."""

    type: Literal["function"]
    name: str


class AskedTool(Answer):
    """A function that was offered."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ReadTokens(CachedTokens):
    """What was read from the prefix store."""

    cache_write_tokens: Literal[0]


class ReasoningTokens(Answer):
    """Tokens of reasoning."""

    reasoning_tokens: Literal[0]


class ResponseUsage(Answer):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: ReadTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class _Response(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    background: Literal[False]
    error: None
    instructions: str | None
    max_output_tokens: int
    max_tool_calls: None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: NoReasoning
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: AskedText
    tool_choice: Literal["none", "auto", "required"] | AskedFunction
    tools: list[AskedTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    metadata: Annotated[dict[str, Any], Field(max_length=0)]


class ResponseAnswer(_Response):
    """A response that has ended. It is incomplete where its length ended it."""

    status: Literal["completed", "incomplete"]
    completed_at: int
    incomplete_details: CutReason | None
    usage: ResponseUsage
    remask: Work


class BegunResponse(_Response):
    """A response that has begun."""

    status: Literal["in_progress"]
    completed_at: None
    incomplete_details: None
    usage: None


class _Event(Answer):
    sequence_number: int


class Begun(_Event):
    """The first two events."""

    type: Literal["response.created", "response.in_progress"]
    response: BegunResponse


class Ended(_Event):
    """The last event."""

    type: Literal["response.completed", "response.incomplete"]
    response: ResponseAnswer


class ItemAdded(_Event):
    """A message or a call begins, or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfItem(_Event):
    item_id: str
    output_index: int


class PartAdded(_OfItem):
    """A text begins, or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText


class TextAdded(_OfItem):
    """What a step adds to a text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[ScoredToken]


class TextDone(_OfItem):
    """A whole text."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[ScoredToken]


class ArgumentsAdded(_OfItem):
    """What a step adds to the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_OfItem):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ResponseFailed(_Event):
    """The last event of a stream that fails."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None
    error: ErrorDetail


ResponseEvent: TypeAlias = (
    Begun | ItemAdded | PartAdded | TextAdded | TextDone | ArgumentsAdded | ArgumentsDone | Ended | ResponseFailed
)
