"""What chats are made of: turns of text, calls of tools and their results, the tools, and the form of an answer."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, WithJsonSchema, model_validator

from remask.checks.fields import Declared
from remask.checks.values import Settings
from remask.errors import ConfigError
from remask.request.forms import StructuredOutputs
from remask.request.transcripts import read_arguments
from remask.server.config import MAX_ITEMS
from remask.server.protocol.base import (
    MAX_KEYWORDS,
    MAX_KIND,
    MAX_TEXT,
    NO_SERVER_TOOLS,
    Body,
    Checked,
    Items,
    LongText,
    Name,
    TokenIds,
    is_hosted,
)

T = TypeVar("T", bound=Body)
MAX_TOOLS = 128
PARAMETERS = Declared(Settings("keywords of JSON Schema", MAX_KEYWORDS), None, "A JSON schema of the arguments.")
VARIABLES = Declared(
    Settings("variables of the chat template", 64, 2**20),
    None,
    "Variables that the chat template reads beside the messages.",
)
ToolName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", max_length=64)]
Parameters: TypeAlias = Annotated[dict[str, Any] | None, Checked("tools: parameters", PARAMETERS)]


class Past(Body):
    """A part of a conversation, which clients send back as they got it: what says nothing to a model is ignored."""

    past = True
    container = "messages"


class Hosted(Past):
    """What another API's server runs, or has run, of itself: left out, as the answer tells."""

    type: Annotated[str, Field(max_length=MAX_KIND)]
    name: Name | None = None


HOSTED = "hosted"


def tag_of(value: Any, kinds: Collection[str], hosted: re.Pattern[str], default: str = "") -> str:
    """The `type` of a part of a conversation, if it is one of `kinds`, or `HOSTED` if `hosted` matches it.

    Returns "" for other types, and `default` if there is no type.
    """
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return default
    if hosted.fullmatch(kind):
        return HOSTED
    return kind if kind in kinds else ""


def _tool_tag(tool: Any) -> str:
    return HOSTED if isinstance(tool, Mapping) and is_hosted(tool.get("type")) else "own"


def _refuse_hosted(choice: Any) -> Any:
    """Return a `tool_choice` unchanged. Raises `ConfigError` if it picks a hosted tool."""
    if _tool_tag(choice) == HOSTED:
        raise ConfigError(f"tool_choice picks a tool of the type {choice['type']!r}, and {NO_SERVER_TOOLS}")
    return choice


Offers: TypeAlias = Annotated[
    list[Annotated[Annotated[T, Tag("own")] | Annotated[Hosted, Tag(HOSTED)], Discriminator(_tool_tag)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]
"""Tools that the model may call, and hosted ones, which are left out unless a body picks one: see `NOT_HOSTED`."""
NOT_HOSTED = BeforeValidator(_refuse_hosted)


class CacheControl(Past):
    """Marks the end of the part of a conversation that is shared with other requests.

    `ttl` is ignored: what is shared stays as long as there is room.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextPart(Past):
    """A part of a message's content: a text, or a refusal of an earlier answer, which is read as one.

    With `cache_control` the shared prefix ends at the end of its message.
    """

    type: Literal["text", "refusal"] = "text"
    text: LongText
    cache_control: CacheControl | None = None
    kinds = ("text", "refusal")

    @model_validator(mode="before")
    @classmethod
    def _read_refusal(cls, part: Any) -> Any:
        return refusal_as_text(part)


def refusal_as_text(part: Any) -> Any:
    """A part of content, with the text of a refusal moved to the field `text`."""
    if isinstance(part, Mapping) and part.get("type") == "refusal" and part.get("text") is None:
        return {**part, "text": part.get("refusal")}
    return part


THOUGHTS = frozenset(["thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"])
"""Types of parts that hold reasoning, which no served model reads: ignored."""


def without_thoughts(content: Any) -> Any:
    """The content of a past answer, without its parts of reasoning and parts whose text is null."""
    if not isinstance(content, list):
        return content

    def is_readable(part: Any) -> bool:
        if not isinstance(part, Mapping):
            return True
        kind = part.get("type")
        return not (isinstance(kind, str) and kind in THOUGHTS) and part.get("text", "") is not None

    return [part for part in content if is_readable(part)]


def _arguments_text(arguments: Any) -> Any:
    """The arguments of a call as text: JSON, unless they are text already; "" for null."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return json.dumps(arguments)


_ANY_ARGUMENTS = {"anyOf": [{"type": "string", "maxLength": MAX_TEXT}, {"type": "object", "maxProperties": MAX_ITEMS}]}
Arguments: TypeAlias = Annotated[LongText, BeforeValidator(_arguments_text), WithJsonSchema(_ANY_ARGUMENTS)]
"""The arguments of a call that an earlier answer made, as text: of an object, or of whatever came in its place."""


class CalledFunction(Past):
    """The function of a tool call. `arguments` are the text of a JSON object; others are shown as they are."""

    name: Name
    arguments: Arguments = ""


class ToolCall(Past):
    """A call of a tool in an assistant's turn."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _read_custom_call(cls, call: Any) -> Any:
        """Turn a call of a tool that takes free text into a function call with the text as its arguments."""
        custom = call.get("custom") if isinstance(call, Mapping) else None
        if not isinstance(custom, Mapping):
            return call
        function = {"name": custom.get("name"), "arguments": custom.get("input")}
        return {**call, "type": "function", "function": function}

    @property
    def rendered(self) -> dict[str, Any]:
        """The call in the form that chat templates read: with arguments as an object, if they are one."""
        function = {"name": self.function.name, "arguments": read_arguments(self.function.arguments)}
        return {"type": self.type, "function": function} | ({} if self.id is None else {"id": self.id})


class Message(Past):
    """One turn. With `cache_control` the shared prefix ends at the end of this message.

    An assistant's turn, and the result of a tool, may have no text. Reasoning is ignored, as no served model reads any.
    The role `developer` is another name of `system`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: LongText | Items[TextPart]
    name: Name | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: Name | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, message: Any) -> Any:
        """Set the missing content of an assistant's or a tool's turn to its refusal or "", and drop its reasoning."""
        if not isinstance(message, Mapping) or message.get("role") not in ("assistant", "tool"):
            return message
        content = message.get("content")
        return {**message, "content": message.get("refusal") or "" if content is None else without_thoughts(content)}

    @model_validator(mode="after")
    def _check_calls(self) -> "Message":
        """Move the last marker of its parts to the message. Raises `ConfigError` on calls of the wrong role."""
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise ConfigError(f"messages: {name} is of the role {role!r}, and this message's is {self.role!r}")
        marks = [] if isinstance(self.content, str) else [part.cache_control for part in self.content]
        self.cache_control = next(filter(None, [self.cache_control, *reversed(marks)]), None)
        return self

    @property
    def chars(self) -> int:
        """Number of characters of its texts and names."""
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        calls = [text for call in self.tool_calls or () for text in (call.function.name, call.function.arguments)]
        return len(self.name or "") + sum(map(len, [*texts, *calls]))

    @property
    def text(self) -> str:
        """The text of its content, parts joined."""
        return joint_text(self.content)

    @property
    def rendered(self) -> dict[str, Any]:
        """The message in the form that chat templates read."""
        fields = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.rendered for call in self.tool_calls] if self.tool_calls else None,
        }
        return {name: value for name, value in fields.items() if value is not None}


Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class Function(Body):
    """A function that the model may call. `parameters` is a JSON schema; forced calls always follow it."""

    name: ToolName
    description: LongText | None = None
    parameters: Parameters = None
    strict: bool | None = None
    ignored = ("cache_control",)


class ToolOffer(Body):
    """A tool of a request. Functions are the only kind."""

    type: Literal["function"]
    function: Function
    kinds = ("function",)
    container = "tools"
    ignored = ("cache_control",)

    @property
    def rendered(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": self.type, "function": {"parameters": {"type": "object", "properties": {}}} | function}


class ChosenFunction(Body):
    """The name of the function to call."""

    name: Name


class ChosenTool(Body):
    """The tool that the answer calls."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Body):
    """A schema that an answer follows. `name` and `description` say what it is for; an answer is always `strict`."""

    name: Name | None = None
    description: LongText | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema", max_length=MAX_KEYWORDS)]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for the form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    _names: tuple[str, str] = PrivateAttr(("response_format", "response_format.json_schema.schema"))

    @property
    def name(self) -> str:
        """The field that asks for it, in the words of the body's API."""
        return self._names[0]

    @property
    def form(self) -> StructuredOutputs | None:
        """The form, or None for any text. Raises `ConfigError` if the schema is missing or cannot be guaranteed."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ConfigError(
                f"response_format: json_schema and the type 'json_schema' go together, and the type is {self.type!r}; "
                "send both or neither"
            )
        if self.type == "text":
            return None
        if self.json_schema is None:
            return StructuredOutputs(json_object=True)
        try:
            return StructuredOutputs(json=self.json_schema.schema_)
        except ConfigError as error:
            raise ConfigError(str(error).replace("structured_outputs.json", self._names[1])) from error


def chars_of(messages: Sequence[Message], variables: Mapping[str, Any] | None) -> int:
    """Number of characters of a conversation and of the variables of its template as JSON."""
    variable_chars = len(json.dumps(variables)) if variables else 0
    return sum(message.chars for message in messages) + variable_chars


class TokenizeBody(Body):
    """Body of `/tokenize`, with a text or a conversation."""

    model: Name | None = None
    prompt: LongText | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Checked("chat_template_kwargs", VARIABLES)] = None
    control_tokens: bool | None = None

    @property
    def texts_name(self) -> str:
        """The field that holds its text."""
        return "messages" if self.prompt is None else "prompt"

    @property
    def prompt_chars(self) -> list[int]:
        """Characters of its one text or conversation."""
        return [chars_of(self.messages or (), self.chat_template_kwargs) + len(self.prompt or "")]


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model: Name | None = None
    tokens: TokenIds


# What bodies of other APIs become, whose fields are checked already.


class Textual(Protocol):
    """A part of a message that holds a text."""

    text: str


def joint_text(content: str | Sequence[Textual]) -> str:
    """The text of a content: a text itself, or the joined texts of its parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def turn(role: Any, text: str, *, call_id: str | None = None, cache_control: CacheControl | None = None) -> Message:
    """Make a turn. With the role `tool` it is the result of the call `call_id`."""
    return Message.model_construct(role=role, content=text, tool_call_id=call_id, cache_control=cache_control)


def add_call(turns: list[Message], call_id: str, name: str, arguments: str) -> None:
    """Add a call to the last of `turns`, or to a new one if that is not the assistant's. Changes `turns`."""
    if not turns or turns[-1].role != "assistant":
        turns.append(turn("assistant", ""))
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    turns[-1].tool_calls = [*(turns[-1].tool_calls or ()), ToolCall.model_construct(id=call_id, function=function)]


def tool_offer(name: str, description: str | None, parameters: dict[str, Any] | None) -> ToolOffer:
    """The tool of a function, from checked fields."""
    function = Function.model_construct(name=name, description=description, parameters=parameters)
    return ToolOffer.model_construct(type="function", function=function)


def chosen_tool(name: str) -> ChosenTool:
    """The `tool_choice` of a function."""
    return ChosenTool.model_construct(type="function", function=ChosenFunction.model_construct(name=name))


def answer_form(kind: Any, schema: Mapping[str, Any] | None, name: str) -> ResponseFormat:
    """The `response_format` for the field `name` of another API. The kind "json_schema" needs a `schema`."""
    json_schema = None if schema is None else JsonSchema.model_validate({"schema": schema})
    form = ResponseFormat.model_construct(type=kind, json_schema=json_schema)
    form._names = name, f"{name}.format.schema"
    return form
