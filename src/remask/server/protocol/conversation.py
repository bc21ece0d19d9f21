"""A conversation: turns of text, calls of tools and their results."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from remask.checks.fields import Declared
from remask.checks.values import Settings, json_object
from remask.errors import ConfigError
from remask.server.known import known_kind
from remask.server.limits import MAX_ITEMS
from remask.server.protocol.base import Body, LongText, Name

VARIABLES = Declared(
    Settings("variables of the chat template", 64, 2**20),
    None,
    "Variables that the chat template reads beside the messages.",
)


class CacheControl(Body):
    """Marks the end of the part of a conversation that is shared with other requests."""

    type: Literal["ephemeral"]


class TextPart(Body):
    """A part of a message's content. Texts are the only kind that is supported."""

    type: Literal["text"]
    text: LongText

    @model_validator(mode="before")
    @classmethod
    def _text(cls, part: Any) -> Any:
        return known_kind("messages", part, frozenset(["text"]))


class CalledFunction(Body):
    """The function of a tool call. `arguments` are the text of a JSON object."""

    name: Name
    arguments: LongText

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        _arguments(text)
        return text


class ToolCall(Body):
    """A call of a tool in an assistant's turn."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def rendered(self) -> dict[str, Any]:
        """The call in the form that chat templates read: with arguments as an object."""
        function = {"name": self.function.name, "arguments": _arguments(self.function.arguments)}
        return {"type": self.type, "function": function} | ({} if self.id is None else {"id": self.id})


class Message(Body):
    """One turn. With `cache_control` the shared prefix ends at the end of this message.

    An assistant's turn that calls tools may have no text. The role `developer` is another name of `system`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: LongText | Annotated[list[TextPart], Field(max_length=MAX_ITEMS, fail_fast=True)]
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, message: Any) -> Any:
        """Leave out what asks for nothing: clients send back whole messages as they got them."""
        if not isinstance(message, Mapping):
            return message
        kept = {name: value for name, value in message.items() if value is not None or name == "content"}
        for name in ("tool_calls", "annotations"):
            if kept.get(name) == []:
                del kept[name]
        calls = kept.get("role") == "assistant" and "tool_calls" in kept
        return kept | {"content": ""} if calls and kept.get("content") is None else kept

    @model_validator(mode="after")
    def _check_calls(self) -> "Message":
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) is not None and self.role != role:
                raise ConfigError(f"messages: {name} is of the role {role!r}, and this message's is {self.role!r}")
        return self

    @property
    def chars(self) -> int:
        """Characters of its texts and its names."""
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        calls = [text for call in self.tool_calls or () for text in (call.function.name, call.function.arguments)]
        return len(self.name or "") + sum(map(len, [*texts, *calls]))

    @property
    def rendered(self) -> dict[str, Any]:
        """The message in the form that chat templates read."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        more: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.tool_calls is not None:
            more["tool_calls"] = [call.rendered for call in self.tool_calls]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text, **{name: value for name, value in more.items() if value is not None}}


Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


def _arguments(text: str) -> dict[str, Any]:
    """The object that the arguments of a tool call are. Raises `ConfigError` where they are none."""
    return json_object("messages: the arguments of a tool call", text)
