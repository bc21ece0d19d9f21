"""The body of `/v1/messages`, Anthropic's API, and of `/v1/messages/count_tokens`."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from remask.checks.fields import Declared, declared
from remask.checks.values import Settings
from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.server.declared import Checked, given, with_declared
from remask.server.fields import FOREIGN, Foreign, read_fields
from remask.server.known import known_kind, known_tool, without
from remask.server.limits import MAX_ITEMS
from remask.server.protocol import (
    MAX_KEYWORDS,
    MAX_TOOLS,
    PARAMETERS,
    Body,
    CacheControl,
    CalledFunction,
    ChatBody,
    JsonSchema,
    LongText,
    Message,
    Name,
    ResponseFormat,
    ToolCall,
    chosen,
    offered,
)

_STOP: Declared = declared(SamplingParams)["stop"]
_INPUT = Declared(Settings("arguments of a call", 1024, 2**20), None, "The arguments of a call.")
_PLATFORM = "it is of Anthropic's own platform"
_NO_TOOLS = "the server runs no tools"

FOREIGN_TO_MESSAGES: Mapping[str, Foreign] = {
    **{name: field for name, field in FOREIGN.items() if name != "metadata"},
    "betas": Foreign("features are not switched", None),
    "billing_policy": Foreign(_PLATFORM, None),
    "cache_control": Foreign("the shared part is found by itself; `cache_control` of a message marks its end", None),
    "compaction": Foreign("a conversation that is too long is an error, not another one"),
    "container": Foreign(_NO_TOOLS),
    "context_management": Foreign("a conversation that is too long is an error, not another one"),
    "diagnostics": Foreign(_PLATFORM, None),
    "fallback_credit_token": Foreign(_PLATFORM, None),
    "fallbacks": Foreign("one model is served", ([],)),
    "inference_geo": Foreign("the model runs where the server does", None),
    "mcp_servers": Foreign(_NO_TOOLS, ([],)),
    "speed": Foreign("it asks for no other answer", None),
    "thinking": Foreign("no served model marks a part of its answer as reasoning", None),
    "thread": Foreign("nothing is kept beyond an answer: send the whole conversation as `messages`"),
    "user_profile_id": Foreign(_PLATFORM, None),
    "workspace_id": Foreign(_PLATFORM, None),
}
"""Fields of the body that are not honoured."""

_THOUGHTS = frozenset(["thinking", "redacted_thinking"])


class _Block(Body):
    @model_validator(mode="before")
    @classmethod
    def _as_it_came(cls, block: Any) -> Any:
        return without(block, "citations", "caller", "toolset_name")


class TextBlock(_Block):
    """A text. Its `citations` say nothing to a model."""

    type: Literal["text"]
    text: LongText
    cache_control: CacheControl | None = None


class ToolUse(_Block):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Annotated[dict[str, Any], Checked("messages: input", _INPUT)]
    cache_control: CacheControl | None = None


def _text_block(where: str) -> BeforeValidator:
    return BeforeValidator(lambda block: known_kind(where, block, frozenset(["text"])))


Texts: TypeAlias = Annotated[
    list[Annotated[TextBlock, _text_block("messages")]], Field(max_length=MAX_ITEMS, fail_fast=True)
]
SystemTexts: TypeAlias = Annotated[
    list[Annotated[TextBlock, _text_block("system")]], Field(max_length=MAX_ITEMS, fail_fast=True)
]


class ToolResult(_Block):
    """What a call has returned. Chat templates know no `is_error`, so the content has to say it."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: LongText | Texts = ""
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class Thoughts(Body):
    """Reasoning of another model, which none that is served reads: ignored."""

    type: Literal["thinking"]


def _block(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and kind in _THOUGHTS:
        return {"type": "thinking"}
    return known_kind("messages", value, frozenset(["text", "tool_use", "tool_result"]))


Block: TypeAlias = Annotated[
    Annotated[TextBlock | ToolUse | ToolResult | Thoughts, Field(discriminator="type")], BeforeValidator(_block)
]


class Turn(Body):
    """One turn. Results of tools stand in a user's, calls of tools in an assistant's."""

    role: Literal["user", "assistant"]
    content: LongText | Annotated[list[Block], Field(max_length=MAX_ITEMS, fail_fast=True)]

    @model_validator(mode="after")
    def _check_blocks(self) -> "Turn":
        for block in () if isinstance(self.content, str) else self.content:
            for kind, role in ((ToolUse, "assistant"), (ToolResult, "user")):
                if isinstance(block, kind) and self.role != role:
                    raise ConfigError(f"messages: {block.type} is of the role {role!r}, and this one is {self.role!r}")
        return self


class OfferedTool(Body):
    """A tool that the model may call. `input_schema` is a JSON schema of an object; forced calls always follow it.

    `cache_control` is ignored, as the shared part is found by itself.
    """

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", max_length=64)]
    description: LongText | None = None
    input_schema: Annotated[dict[str, Any], Checked("tools: input_schema", PARAMETERS)]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _tool(cls, tool: Any) -> Any:
        ignored = "cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "input_examples"
        return without(known_tool(tool, frozenset(["custom"])), *ignored)


class ToolChoice(Body):
    """Which tool the answer calls: `auto` leaves it open, `any` asks for one, `tool` names it."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> "ToolChoice":
        if (self.name is not None) != (self.type == "tool"):
            raise ConfigError("tool_choice: name and the type 'tool' go together")
        return self


class OutputFormat(Body):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema", max_length=MAX_KEYWORDS)]


class OutputConfig(Body):
    """How the answer is written. `effort` is ignored: no served model knows it."""

    format: OutputFormat | None = None
    effort: Annotated[str, Field(max_length=64)] | None = None


class Metadata(Body):
    """Whose request it is."""

    user_id: Name | None = None


class CountTokensBody(Body):
    """Body of `/v1/messages/count_tokens`."""

    model: Name | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    system: LongText | SystemTexts | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    control_tokens: bool | None = None
    _chat: ChatBody = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, body: Any) -> Any:
        return read_fields(body, cls.model_fields, FOREIGN_TO_MESSAGES)

    @model_validator(mode="after")
    def _as_chat(self) -> "CountTokensBody":
        if self.messages[-1].role == "assistant":
            raise ConfigError(
                "messages: the last one is the assistant's, and a response begins a turn of its own; end with a user's"
            )
        self._chat = ChatBody.translated("messages", **self._fields())
        return self

    def _fields(self) -> dict[str, Any]:
        """The fields of the chat body."""
        choice, form = self.tool_choice, None if self.output_config is None else self.output_config.format
        wanted: Any = None
        if choice is not None:
            wanted = chosen(choice.name) if choice.name is not None else choice.type.replace("any", "required")
        schema = None if form is None else JsonSchema.model_validate({"schema": form.schema_})
        return {
            "model": self.model,
            "messages": [*_system(self.system), *(each for turn in self.messages for each in _messages(turn))],
            "tools": [
                offered(name=tool.name, description=tool.description, parameters=tool.input_schema)
                for tool in self.tools or ()
            ],
            "tool_choice": wanted,
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": None
            if schema is None
            else ResponseFormat.model_construct(type="json_schema", json_schema=schema),
            "control_tokens": self.control_tokens,
        }

    @property
    def chat(self) -> ChatBody:
        """The same request as a body of chat completions."""
        return self._chat


@with_declared(SamplingParams, Terms)
class MessagesBody(CountTokensBody):
    """Body of `/v1/messages`."""

    stop_sequences: Annotated[Any, Checked("stop_sequences", _STOP)] = None
    metadata: Metadata | None = None
    stream: bool | None = None

    def _fields(self) -> dict[str, Any]:
        own, terms = given(self, SamplingParams), given(self, Terms)
        if self.stop_sequences is not None:
            if "stop" in own:
                raise ConfigError("stop and stop_sequences are two names of one thing; send one of them")
            own["stop"] = self.stop_sequences
        user = None if self.metadata is None else self.metadata.user_id
        logprobs = terms.get("top_logprobs") is not None
        return {**super()._fields(), **own, **terms, "stream": self.stream, "user": user, "logprobs": logprobs}


def _system(given: str | Sequence[TextBlock] | None) -> list[Message]:
    if given is None:
        return []
    marks = [] if isinstance(given, str) else [block.cache_control for block in given if block.cache_control]
    return [Message.model_construct(role="system", content=_joined(given), cache_control=marks[-1] if marks else None)]


def _messages(turn: Turn) -> list[Message]:
    """A turn as chats have it: each result of a tool is a message of its own, and calls stand beside the text."""
    if isinstance(turn.content, str):
        return [Message.model_construct(role=turn.role, content=turn.content)]
    made: list[Message] = []
    for block in turn.content:
        if isinstance(block, Thoughts):
            continue
        if isinstance(block, ToolResult):
            content = _joined(block.content)
            made.append(Message.model_construct(role="tool", content=content, tool_call_id=block.tool_use_id))
        else:
            if not made or made[-1].role != turn.role:
                made.append(Message.model_construct(role=turn.role, content=""))
            if isinstance(block, TextBlock):
                made[-1].content = f"{made[-1].content}{block.text}"
            else:
                function = CalledFunction.model_construct(name=block.name, arguments=json.dumps(block.input))
                call = ToolCall.model_construct(id=block.id, function=function)
                made[-1].tool_calls = [*(made[-1].tool_calls or ()), call]
        made[-1].cache_control = block.cache_control or made[-1].cache_control
    return made or [Message.model_construct(role=turn.role, content="")]


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
