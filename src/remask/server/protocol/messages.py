"""The body of `/v1/messages`, Anthropic's API, and of `/v1/messages/count_tokens`."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
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
    PARAMETERS,
    THOUGHTS,
    Arguments,
    CacheControl,
    Hosted,
    Message,
    Offers,
    Past,
    ToolName,
    add_call,
    answer_form,
    chosen_tool,
    joint_text,
    tag_of,
    tool_offer,
    turn,
)
from remask.server.protocol.generation import ChatBody, TranslatedBody

_STOP: Declared = declared(SamplingParams)["stop"]
_PLATFORM = "it is of Anthropic's own platform"
_NO_TOOLS = "the server runs no tools"

FOREIGN_TO_MESSAGES: Mapping[str, Foreign] = {
    **{name: field for name, field in FOREIGN.items() if name != "metadata"},
    "betas": Foreign("features are not switched", None),
    "billing_policy": Foreign(_PLATFORM, None),
    "compaction": Foreign("a conversation that is too long is an error, not another one"),
    "container": Foreign(_NO_TOOLS),
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

_BLOCKS = ("text", "tool_use", "tool_result")
_KINDS = THOUGHTS.union(_BLOCKS)
_HOSTED = re.compile(r"(server|mcp)_tool_use|\w{1,48}_tool_result", re.ASCII)  # with what these returned


class TextBlock(Past):
    """A text."""

    type: Literal["text"]
    text: LongText
    cache_control: CacheControl | None = None


class ToolUse(Past):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Arguments = ""
    cache_control: CacheControl | None = None


def _text_block(where: str) -> BeforeValidator:
    return BeforeValidator(lambda block: check_kind(where, block, ["text"]))


Texts: TypeAlias = Items[Annotated[TextBlock, _text_block("messages")]]
SystemTexts: TypeAlias = Items[Annotated[TextBlock, _text_block("system")]]


class ToolResult(Past):
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
    """A block without the contents of thoughts. Raises `ConfigError` on an unknown type."""
    kind = _kind(value)
    if kind == "thinking":
        return {"type": kind}
    return value if kind == HOSTED else check_kind("messages", value, _BLOCKS)


def _kind(value: Any) -> str:
    kind = tag_of(value, _KINDS, _HOSTED)
    return "thinking" if kind in THOUGHTS else kind


ContentBlock: TypeAlias = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("text")]
        | Annotated[ToolUse, Tag("tool_use")]
        | Annotated[ToolResult, Tag("tool_result")]
        | Annotated[Thoughts, Tag("thinking")]
        | Annotated[Hosted, Tag(HOSTED)],
        Discriminator(_kind, "block", f"a block is an object whose type is one of {', '.join(_BLOCKS)}"),
    ],
    BeforeValidator(_block),
]


class MessageTurn(Past):
    """One turn. Results of tools stand in a user's, calls of tools in an assistant's."""

    role: Literal["user", "assistant"]
    content: LongText | Items[ContentBlock]

    @model_validator(mode="after")
    def _check_blocks(self) -> "MessageTurn":
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
    name: ToolName
    description: LongText | None = None
    input_schema: Annotated[dict[str, Any], Checked("tools: input_schema", PARAMETERS)]
    strict: bool | None = None
    kinds = ("custom",)
    container = "tools"
    ignored = ("cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "input_examples")


class ToolChoice(Body):
    """Which tool the answer calls: `auto` leaves it open, `any` asks for one, `tool` names it."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "ToolChoice":
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


class ContextEdit(Body):
    """What becomes of a part of the conversation. Thoughts may be cleared, which no served model reads anyway."""

    type: Name
    past = True

    @model_validator(mode="after")
    def _check_type(self) -> "ContextEdit":
        """Raise `ConfigError` on an edit that removes more than reasoning, which no served model reads."""
        if not self.type.startswith("clear_thinking_"):
            raise ConfigError(
                f"context_management: edits: the type {self.type[:64]!r} is not supported, as a conversation that is "
                "too long is an error, not another one; leave it out and send what the model should read"
            )
        return self


class ContextManagement(Body):
    """What becomes of a conversation before the model reads it: nothing."""

    edits: Items[ContextEdit] | None = None
    ignored = ()


class CountTokensBody(TranslatedBody):
    """Body of `/v1/messages/count_tokens`."""

    model: Name | None = None
    messages: Annotated[list[MessageTurn], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    system: LongText | SystemTexts | None = None
    tools: Offers[OfferedTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    control_tokens: bool | None = None
    foreign = FOREIGN_TO_MESSAGES

    def _as_chat(self) -> ChatBody:
        contents = [message.content for message in self.messages if not isinstance(message.content, str)]
        hosted = [block for content in contents for block in content if isinstance(block, Hosted)]
        return ChatBody.translated("messages", "max_tokens", hosted, **self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        """The fields of the chat body."""
        choice = self.tool_choice
        form = None if self.output_config is None else self.output_config.format
        continues = self.messages[-1].role == "assistant"
        tool_choice: Any = None
        if choice is not None and choice.name is not None:
            tool_choice = chosen_tool(choice.name)
        elif choice is not None:
            tool_choice = "required" if choice.type == "any" else choice.type
        system = [] if self.system is None else [_turn("system", self.system)]
        return {
            "model": self.model,
            "messages": [*system, *chain.from_iterable(map(_turns, self.messages))],
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
            "tools": [
                tool if isinstance(tool, Hosted) else tool_offer(tool.name, tool.description, tool.input_schema)
                for tool in self.tools or ()
            ],
            "tool_choice": tool_choice,
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": None if form is None else answer_form(form.type, form.schema_, "output_config"),
            "control_tokens": self.control_tokens,
        }


@with_declared(SamplingParams, Terms)
class MessagesBody(CountTokensBody):
    """Body of `/v1/messages`."""

    stop_sequences: Annotated[Any, Checked("stop_sequences", _STOP)] = None
    metadata: Metadata | None = None
    stream: bool | None = None

    def _chat_fields(self) -> dict[str, Any]:
        """The fields of the chat body. Raises `ConfigError` on fields that have no place in an answer of this API."""
        sampling = declared_fields(self, SamplingParams)
        terms = declared_fields(self, Terms)
        if self.stop_sequences is not None:
            if "stop" in sampling:
                raise ConfigError("stop and stop_sequences are two names of one thing; send one of them")
            sampling["stop"] = self.stop_sequences
        user = None if self.metadata is None else self.metadata.user_id
        if "top_logprobs" in terms:
            raise ConfigError("top_logprobs: answers of this API have no place for it; send it to /v1/chat/completions")
        return {**super()._chat_fields(), **sampling, **terms, "stream": self.stream, "user": user}


def _turn(role: str, content: str | Sequence[TextBlock], call_id: str | None = None) -> Message:
    """A turn of a text or of blocks, with the last `cache_control` marker of the blocks."""
    marks = [] if isinstance(content, str) else [block.cache_control for block in content if block.cache_control]
    return turn(role, joint_text(content), call_id=call_id, cache_control=marks[-1] if marks else None)


def _turns(message: MessageTurn) -> list[Message]:
    """The chat messages of a turn: one for each result of a tool, and one for its text with all calls."""
    if isinstance(message.content, str):
        return [turn(message.role, message.content)]
    turns: list[Message] = []
    for block in message.content:
        if isinstance(block, Thoughts | Hosted):
            continue
        if isinstance(block, ToolResult):
            turns.append(_turn("tool", block.content, block.tool_use_id))
        elif isinstance(block, ToolUse):
            add_call(turns, block.id, block.name, block.input)
        else:
            if not turns or turns[-1].role != message.role:
                turns.append(turn(message.role, ""))
            turns[-1].content = f"{turns[-1].content}{block.text}"
        turns[-1].cache_control = block.cache_control or turns[-1].cache_control
    return turns or [turn(message.role, "")]
