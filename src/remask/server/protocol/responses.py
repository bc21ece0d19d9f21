"""The body of `/v1/responses`, OpenAI's newer API, without what a server would have to keep between requests."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from remask.checks.fields import Declared, declared
from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.server.config import MAX_ITEMS
from remask.server.fields import FOREIGN
from remask.server.protocol.base import (
    MAX_KEYWORDS,
    Body,
    Checked,
    Foreign,
    Items,
    LongText,
    Name,
    check_kind,
    declared_fields,
    with_declared,
)
from remask.server.protocol.conversation import (
    HOSTED,
    NOT_HOSTED,
    Arguments,
    Hosted,
    Message,
    Offers,
    Parameters,
    Past,
    ToolName,
    add_call,
    answer_form,
    chosen_tool,
    joint_text,
    refusal_as_text,
    tag_of,
    tool_offer,
    turn,
    without_thoughts,
)
from remask.server.protocol.generation import ChatBody, TranslatedBody, with_length

_MAX_TOKENS: Declared = declared(SamplingParams)["max_tokens"]
_STATELESS = "nothing is kept beyond an answer: send the whole conversation as `input`"
_PLATFORM = "it is of OpenAI's own platform"
LOGPROBS = "message.output_text.logprobs"

FOREIGN_TO_RESPONSES: Mapping[str, Foreign] = {
    **FOREIGN,
    "access_programs": Foreign(_PLATFORM),
    "background": Foreign("an answer goes to the connection that asked for it", (False,)),
    "background_options": Foreign(_PLATFORM),
    "context_management": Foreign(_STATELESS, ([],)),
    "conversation": Foreign(_STATELESS),
    "image": Foreign("models read and write text alone"),
    "max_tool_calls": Foreign("it is of tools that a server runs, and this one runs none", None),
    "previous_response_id": Foreign(_STATELESS),
    "prompt": Foreign("prompts are not kept here: send `instructions` and `input`"),
    "store": Foreign(_STATELESS, (False,)),
    "truncation": Foreign("an input that is too long is an error, not another input", ("disabled",)),
}
"""Fields of the body that are not honoured."""


class _Item(Past):
    container = "input"


class InputPart(_Item):
    """A part of a message's content: a text, or a refusal of an earlier answer, which is read as one."""

    type: Literal["input_text", "output_text", "refusal"] = "input_text"
    text: LongText
    kinds = ("input_text", "output_text", "refusal")

    @model_validator(mode="before")
    @classmethod
    def _read_refusal(cls, part: Any) -> Any:
        return refusal_as_text(part)


class InputMessage(_Item):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: LongText | Items[InputPart]

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, message: Any) -> Any:
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            return message
        content = message.get("content")
        return {**message, "content": "" if content is None else without_thoughts(content)}


class InputCall(_Item):
    """A call that an earlier answer made. `arguments` are the text of a JSON object; others are shown as they are."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Arguments = ""


class InputResult(_Item):
    """What such a call has returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: LongText | Items[InputPart] = ""


class Reasoning(Body):
    """Reasoning of another model, which none that is served reads: ignored."""

    type: Literal["reasoning"]


_ITEMS = frozenset(["message", "function_call", "function_call_output", "reasoning"])
_HOSTED = re.compile(
    r"(code_interpreter|file_search|image_generation|mcp|tool_search|web_search)_call|tool_search_output|"
    r"mcp_(list_tools|approval_request|approval_response)|program(_output)?"
)


def _item(value: Any) -> Any:
    """An item of the input, with custom calls and their outputs turned into those of functions.

    Raises `ConfigError` on an unknown type.
    """
    if isinstance(value, Mapping) and value.get("type") in ("custom_tool_call", "custom_tool_call_output"):
        function_type = value["type"].replace("custom_tool", "function")
        value = {**value, "type": function_type, "arguments": value.get("input")}
    tag = _kind(value)
    if tag == "reasoning":
        return {"type": tag}
    return value if tag == HOSTED else check_kind("input", value, _ITEMS)


def _kind(value: Any) -> str:
    return tag_of(value, _ITEMS, _HOSTED, "message")


Item: TypeAlias = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("message")]
        | Annotated[InputCall, Tag("function_call")]
        | Annotated[InputResult, Tag("function_call_output")]
        | Annotated[Reasoning, Tag("reasoning")]
        | Annotated[Hosted, Tag(HOSTED)],
        Discriminator(_kind),
    ],
    BeforeValidator(_item),
]


class OfferedFunction(Body):
    """A function that the model may call, as chat's, but flat."""

    type: Literal["function"]
    name: ToolName
    description: LongText | None = None
    parameters: Parameters = None
    strict: bool | None = None
    kinds = ("function",)
    container = "tools"
    ignored = ()


class NamedFunction(Body):
    """The function that the answer calls."""

    type: Literal["function"]
    name: Name


class TextFormat(Body):
    """The form of the answer: `schema` goes with the type `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: LongText | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema", max_length=MAX_KEYWORDS)] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ConfigError(
                f"text: format: schema and the type 'json_schema' go together, and the type is {self.type!r}; send "
                "both or neither"
            )
        return self


class TextOptions(Body):
    """How the answer is written. `verbosity` is ignored: no served model knows it."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStream(Body):
    """Options of a stream, none of which changes anything: events carry no padding."""

    include_obfuscation: bool | None = None


@with_declared(SamplingParams, Terms)
class ResponsesBody(TranslatedBody):
    """Body of `/v1/responses`: `input` is a text, or messages, calls of tools and their results."""

    model: Name | None = None
    input: LongText | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: LongText | None = None
    max_output_tokens: Annotated[int | None, Checked("max_output_tokens", _MAX_TOKENS)] = None
    text: TextOptions | None = None
    tools: Offers[OfferedFunction] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedFunction | None, NOT_HOSTED] = None
    parallel_tool_calls: bool | None = None
    include: Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    stream: bool | None = None
    stream_options: ResponsesStream | None = None
    user: Name | None = None
    foreign = FOREIGN_TO_RESPONSES

    def _as_chat(self) -> ChatBody:
        """The same request as a body of chat completions. Raises `ConfigError` if fields contradict each other."""
        sampling = declared_fields(self, SamplingParams)
        terms = declared_fields(self, Terms)
        form = None if self.text is None else self.text.format
        choice = self.tool_choice
        return ChatBody.translated(
            "input",
            "max_tokens" if "max_tokens" in sampling else "max_output_tokens",
            [] if isinstance(self.input, str) else [item for item in self.input if isinstance(item, Hosted)],
            **with_length(sampling, "max_output_tokens", self.max_output_tokens),
            **terms,
            model=self.model,
            messages=_messages(self.instructions, self.input),
            stream=self.stream,
            user=self.user,
            tools=[
                tool if isinstance(tool, Hosted) else tool_offer(tool.name, tool.description, tool.parameters)
                for tool in self.tools or ()
            ],
            tool_choice=chosen_tool(choice.name) if isinstance(choice, NamedFunction) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=LOGPROBS in (self.include or ()) or bool(terms.get("top_logprobs")),
            response_format=None if form is None else answer_form(form.type, form.schema_, "text"),
        )


def _messages(instructions: str | None, items: str | Sequence[Any]) -> list[Message]:
    """The chat messages of a response's input. Successive calls, and a text before them, are one assistant turn.

    Raises `ConfigError` if there are none.
    """
    turns = [] if instructions is None else [turn("system", instructions)]
    if isinstance(items, str):
        return [*turns, turn("user", items)]
    for item in items:
        if isinstance(item, InputMessage):
            turns.append(turn(item.role, joint_text(item.content)))
        elif isinstance(item, InputCall):
            add_call(turns, item.call_id, item.name, item.arguments)
        elif isinstance(item, InputResult):
            turns.append(turn("tool", joint_text(item.output), call_id=item.call_id))
    if not turns:
        raise ConfigError("input holds no message; send one at least")
    return turns
