"""Answers of `/v1/responses`: OpenAI's response object, and the events of its stream."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import Field

from remask.answers.answer import SettledToken
from remask.errors import RemaskError
from remask.request.result import Result
from remask.server.answers.base import Answer, CachedTokens, ScoredToken, Work
from remask.server.answers.generation import AnswerPart, Events, SingleAnswer, usage
from remask.server.errors import ErrorDetail, error_object
from remask.server.protocol.responses import NamedFunction, OfferedFunction, ResponsesBody

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
    name: NotRequired[str]
    description: NotRequired[str]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool]


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


def response_usage(results: Sequence[Result]) -> ResponseUsage:
    """The usage of a response, or of decisions."""
    tokens = usage(results)
    cached = tokens["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens["total_tokens"],
    }


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


class ResponsesAnswer(SingleAnswer):
    """A response whose output is messages and calls, in the order in which the model wrote them.

    The other arguments are those of `Generation`.
    """

    def __init__(self, *args: Any, responses_body: ResponsesBody) -> None:
        super().__init__(*args)
        self.responses_body = responses_body
        self._sequence_number = 0

    def _answer_start(self) -> Events:
        response = self._response("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _part_start(self, part: AnswerPart) -> Events:
        item = self._item(len(self.parts) - 1, "in_progress")
        if part.call_id is not None:
            return [self._output_event("added", item)]
        added = self._text_event("response.content_part.added", part=_text(part))
        return [self._output_event("added", item), added]

    def _part_delta(self, part: AnswerPart, text: str, scored_tokens: Sequence[SettledToken]) -> Events:
        if part.call_id is not None:
            return [self._item_event("response.function_call_arguments.delta", delta=text)]
        logprobs = [self.context.logprobs_entry(token) for token in scored_tokens] if self.has_logprobs else []
        part.logprobs += logprobs
        return [self._text_event("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _part_end(self, part: AnswerPart) -> Events:
        end_event = self._output_event("done", self._item(len(self.parts) - 1, "completed"))
        if part.call_id is not None:
            kind = "response.function_call_arguments.done"
            return [self._item_event(kind, arguments=part.text, name=part.name), end_event]
        return [
            self._text_event("response.output_text.done", text=part.text, logprobs=part.logprobs),
            self._text_event("response.content_part.done", part=_text(part)),
            end_event,
        ]

    def _answer_end(self) -> Events:
        whole = self._whole_answer()
        return [{"type": f"response.{whole['status']}", "response": whole}]

    def _whole_answer(self) -> Mapping[str, Any]:
        is_cut = self.results[0].finish_reason == "length" and not self.has_calls
        response = self._response("incomplete" if is_cut else "completed")
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**response, "usage": response_usage(self.all_results), "remask": self.work}

    def _encode(self, event: Mapping[str, Any]) -> bytes:
        self._sequence_number += 1
        return super()._encode({**event, "sequence_number": self._sequence_number - 1})

    def _error_event(self, error: RemaskError) -> bytes:
        detail = error_object(error)["error"]
        flat = {"code": detail["code"] or detail["type"], "message": detail["message"], "param": detail["param"]}
        # The official client raises an exception only for what is under `error`.
        return self._encode({"type": "error", **flat, "error": detail})

    def _item(self, number: int, status: Status) -> OutputItem:
        """The output item of the part with this number."""
        part = self.parts[number]
        item_id = self._item_id(number)
        if part.call_id is None:
            # An item is announced before its content, which has events of its own.
            content = [] if status == "in_progress" else [_text(part)]
            return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}
        return {
            "id": item_id,
            "type": "function_call",
            "status": status,
            "call_id": part.call_id,
            "name": part.name,
            "arguments": part.text,
        }

    def _item_id(self, number: int) -> str:
        kind = "msg" if self.parts[number].call_id is None else "fc"
        return f"{kind}_{self.context.id}-{number}"

    def _output_event(self, phase: str, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": f"response.output_item.{phase}", "output_index": len(self.parts) - 1, "item": item}

    def _item_event(self, kind: str, **content: Any) -> dict[str, Any]:
        number = len(self.parts) - 1
        return {"type": kind, "item_id": self._item_id(number), "output_index": number, **content}

    def _text_event(self, kind: str, **content: Any) -> dict[str, Any]:
        return self._item_event(kind, content_index=0, **content)

    def _response(self, status: str) -> dict[str, Any]:
        """The response object. Fields that the request left out have the values that were used."""
        body = self.responses_body
        request = self.answers[0].request
        params = request.params
        choice = body.tool_choice
        form = None if body.text is None else body.text.format
        tools = [tool for tool in body.tools or () if isinstance(tool, OfferedFunction)]
        return {
            "id": f"resp_{self.context.id}",
            "object": "response",
            "created_at": self.context.created,
            "completed_at": None if status == "in_progress" else int(time.time()),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": len(request.response.answer_places(params.max_tokens)),
            "max_tool_calls": None,
            "model": self.context.model,
            "output": [self._item(number, "completed") for number in range(len(self.parts))],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [{"strict": True, "parameters": None, **tool.model_dump()} for tool in tools],
            "top_logprobs": self.terms.top_logprobs or 0,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": {},
        }


def _text(part: AnswerPart) -> OutputText:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": list(part.logprobs)}
