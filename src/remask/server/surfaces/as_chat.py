"""What bodies of other APIs become: turns, calls, tools and forms of a chat body. Their fields are checked already."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from remask.server.protocol.answer_form import JsonSchema, ResponseFormat
from remask.server.protocol.conversation import CacheControl, CalledFunction, Message, ToolCall
from remask.server.protocol.tool_offers import ChosenFunction, ChosenTool, Function, ToolOffer


class Textual(Protocol):
    """A part of a message that holds a text."""

    text: str


def joined(content: str | Sequence[Textual]) -> str:
    """A text, or those of parts, one behind the other."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def turn(role: Any, text: str, *, call: str | None = None, mark: CacheControl | None = None) -> Message:
    """A turn; of the role `tool` it is the result of `call`. A `mark` ends the shared prefix with it."""
    return Message.model_construct(role=role, content=text, tool_call_id=call, cache_control=mark)


def add_call(turns: list[Message], call: str, name: str, arguments: str) -> None:
    """Add a call to the assistant's turn at the end of `turns`, which is begun where another one stands there."""
    if not turns or turns[-1].role != "assistant":
        turns.append(turn("assistant", ""))
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    turns[-1].tool_calls = [*(turns[-1].tool_calls or ()), ToolCall.model_construct(id=call, function=function)]


def offered(name: str, description: str | None, parameters: dict[str, Any] | None) -> ToolOffer:
    """A tool."""
    function = Function.model_construct(name=name, description=description, parameters=parameters)
    return ToolOffer.model_construct(type="function", function=function)


def chosen(name: str) -> ChosenTool:
    """The choice of a tool."""
    return ChosenTool.model_construct(type="function", function=ChosenFunction.model_construct(name=name))


def answer_form(kind: Any, schema: Mapping[str, Any] | None) -> ResponseFormat:
    """The form of the answer; the kind `json_schema` goes with a `schema`."""
    named = None if schema is None else JsonSchema.model_validate({"schema": schema})
    return ResponseFormat.model_construct(type=kind, json_schema=named)
