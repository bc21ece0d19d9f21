"""Calls of tools: how an answer must be written that calls one, and how calls are read from answers."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from remask.checks.values import shown
from remask.errors import ConfigError
from remask.request.forms import StructuredOutputs
from remask.request.json_schema import escape


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes a call: an object of `name` and arguments, between two texts.

    Attributes:
        begin: the text before the object; "" if an answer that is an object is a call.
        end: the text behind it.
        arguments: the key of the arguments.
    """

    begin: str
    end: str
    arguments: str

    def affixes(self, name: str) -> tuple[str, str]:
        """The texts before and behind the arguments of a call of the tool `name`."""
        return f'{self.begin}{{"name": {json.dumps(name)}, "{self.arguments}": ', f"}}{self.end}"


# Of Hermes, also used by Qwen 2.5 and 3 and the models made from them (Dream, Fast-dLLM v2, SDAR).
HERMES = CallFormat("<tool_call>\n", "\n</tool_call>", "arguments")
# Of Llama 3.1 and later.
LLAMA = CallFormat("", "", "parameters")


_PROPERTY_KEYWORDS = frozenset(
    ["$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "oneOf", "properties", "propertyNames"]
)
"""Keywords that say what arguments there may be. A schema with none of them allows no arguments."""


def detect_call_format(template: str | None) -> CallFormat:
    """The format that a chat template teaches, by default Hermes'."""
    if template is None or "tools" not in template or HERMES.begin.strip() in template:
        return HERMES
    return LLAMA


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call. `parameters` is a JSON schema of an object, or None for no arguments."""

    name: str
    parameters: Mapping[str, Any] | None

    @property
    def arguments_schema(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments, an object. Raises `ConfigError` if `parameters` has another type."""
        schema = dict(self.parameters or {})
        kinds = schema.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise ConfigError(
                f"tools: the parameters of {self.name!r} have the type {shown(kinds)}, and arguments are an object; "
                "send the type 'object', and what is meant as one of its properties"
            )
        if not _PROPERTY_KEYWORDS & schema.keys():
            schema["properties"] = {}
        return schema | {"type": "object"}


@dataclass(frozen=True)
class ToolCalls:
    """What a request says of calls.

    Attributes:
        tools: the tools that may be called.
        forced: whether a call must be made: of one tool ("named"), of any ("required"), or of any unless the answer is
            text ("choice"), which its form ensures. None: calls are found in the text of the answer.
        single: an answer makes at most one call.
        format: how calls are written.
        text_form: with "choice", the form that the request asks of an answer in text, if any.
    """

    tools: Sequence[Tool]
    forced: Literal["named", "required", "choice"] | None
    single: bool
    format: CallFormat
    text_form: StructuredOutputs | None = None

    @property
    def affixes(self) -> tuple[str, str] | None:
        """The texts before and behind the hole of a forced call. Returns None for a "choice", which is all hole."""
        if self.forced == "choice":
            return None
        if len(self.tools) == 1:
            return self.format.affixes(self.tools[0].name)
        return self.format.begin, self.format.end

    @cached_property
    def constraint(self) -> StructuredOutputs:
        """The form of the hole of a forced call: the arguments of the only tool, a call of one of several, or a choice.

        Raises `ConfigError` on schemas that cannot be guaranteed.
        """
        forms = [_schema_form(tool.arguments_schema, f"the parameters of {tool.name!r}") for tool in self.tools]
        if len(forms) == 1 and self.forced != "choice":
            return forms[0]
        calls = []
        for tool in self.tools:
            # References in a schema with an `$id` are relative to that schema.
            arguments = {"$id": f"tool:{tool.name}", **tool.arguments_schema}
            properties = {"name": {"const": tool.name}, self.format.arguments: arguments}
            calls.append({"type": "object", "properties": properties, "required": list(properties)})
        form = _schema_form({"anyOf": calls}, "the choice between all tools")
        if self.forced != "choice":
            return form
        # One call or several, or text: in the requested form, or anything that does not begin as a call does.
        begin, end = self.format.begin, self.format.end
        text = f"([^{begin[0]}](?s:.)*)?" if self.text_form is None else f"({self.text_form.source[1]})"
        call = f"{escape(begin)}({form.source[1]}){escape(end)}"
        return _Choice(json=form.json, pattern=f"{call}|{text}" if self.single else f"({call}\\n?)+|{text}")


@dataclass(frozen=True)
class _Choice(StructuredOutputs):
    """Calls between their affixes, or text, as a regular expression."""

    pattern: str = ""

    @property
    def source(self) -> tuple[str, str]:
        return "json", self.pattern or super().source[1]


def messages_with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Messages for a chat template without tools: calls, their results and `tools` become texts in Hermes' format.

    The tools are described in the system turn, which is added if there is none.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        calls = [
            f"{HERMES.begin}{json.dumps(call['function'], ensure_ascii=False)}{HERMES.end}"
            for call in message.get("tool_calls") or ()
        ]
        text = "\n".join(filter(None, [message["content"], *calls]))
        if message["role"] == "tool":
            turns.append({"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"})
        else:
            turns.append({"role": message["role"], "content": text})
    if tools:
        functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = (
            f"You may call these functions:\n<tools>\n{functions}\n</tools>\nTo call one, answer with its name and its "
            f'arguments:\n{HERMES.begin}{{"name": NAME, "arguments": OBJECT}}{HERMES.end}'
        )
        first = turns.pop(0)["content"] if turns[0]["role"] == "system" else ""
        turns.insert(0, {"role": "system", "content": f"{first}\n\n{text}".strip()})
    return turns


def _schema_form(schema: Mapping[str, Any], subject: str) -> StructuredOutputs:
    """The form of a JSON schema. Raises `ConfigError` if it cannot be guaranteed; `subject` is what the error names."""
    try:
        return StructuredOutputs(json=schema)
    except ConfigError as error:
        reason = str(error).replace("structured_outputs.json", "the schema")
        raise ConfigError(f"tools: {subject} cannot be guaranteed: {reason}") from error


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What a step adds to a call: text of its arguments, and with the first piece its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    @property
    def openai_delta(self) -> dict[str, Any]:
        """The piece as OpenAI's API streams it."""
        name = {} if self.name is None else {"name": self.name}
        head = {} if self.id is None else {"id": self.id, "type": "function"}
        return {"index": self.index, **head, "function": {**name, "arguments": self.arguments}}


def join_pieces(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """The calls that `pieces` make up, as OpenAI's API writes them in an answer that is not streamed."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.id is not None:
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


@dataclass(slots=True)
class CallReader:
    """Reads calls from the text of one answer as it settles. Everything else stays text.

    A call whose arguments fill a hole is returned piece by piece, any other once it is complete. Text between the
    affixes of a call that is not an object, or that names an unknown tool, is returned unchanged.
    """

    tool_calls: ToolCalls
    calls: int = 0
    _buffer: str = ""  # text that is not read yet
    _in_call: bool = False  # the beginning of a call was read, and not its end
    _after_call: bool = False  # the end of a call was read, and nothing but line ends since
    _is_text: bool = False  # text was read that cannot begin a call

    def finish_reason(self, reason: str) -> str:
        """OpenAI's name for the finish reason `reason`: "tool_calls" if the model chose to make calls."""
        return "tool_calls" if self.calls and self.tool_calls.forced != "named" else reason

    def read(self, text: str, *, final: bool) -> tuple[str, list[CallPiece]]:
        """Take new text, the last one if `final`. Returns text of the answer, and pieces of calls."""
        tool_calls = self.tool_calls
        if tool_calls.forced is None:
            return self._parse(text, final)
        if tool_calls.forced == "choice":
            answer = self._buffer + text
            if answer and not self.calls and not self._in_call:
                self._is_text |= not answer.startswith(tool_calls.format.begin[0])
            return (text, []) if self._is_text else self._parse(text, final)
        if len(tool_calls.tools) == 1:
            if not self.calls:  # clients expect one piece of each call in a step
                return "", [self._new_call(tool_calls.tools[0].name, text)]
            return "", [CallPiece(0, text)] if text else []
        self._buffer += text
        if not final:
            return "", []
        call = self._parse_call(self._buffer)
        return ("", [call]) if call is not None else (self._buffer, [])

    def _parse(self, text: str, final: bool) -> tuple[str, list[CallPiece]]:
        """`read` for an answer that may hold text and calls between affixes."""
        self._buffer += text
        if self._has_all_calls:
            self._buffer = ""
            return "", []
        if not self.tool_calls.format.begin:
            return self._parse_object(final)
        output = ""
        pieces: list[CallPiece] = []
        begin = self.tool_calls.format.begin.strip()
        end = self.tool_calls.format.end.strip()
        while not self._has_all_calls:
            if self._after_call:  # line ends between calls are no text
                self._buffer = self._buffer.lstrip("\n")
                self._after_call = not self._buffer
            head, affix, rest = self._buffer.partition(end if self._in_call else begin)
            if not affix:
                break
            self._buffer = rest
            if not self._in_call:
                output += head
            elif (call := self._parse_call(head)) is not None:
                pieces.append(call)
                self._after_call = True
            else:
                output += f"{begin}{head}{end}"
            self._in_call = not self._in_call
        if self._has_all_calls:
            self._buffer = ""
        elif final:
            output += (begin if self._in_call else "") + self._take_buffer()
        elif not self._in_call:
            # A beginning of `begin` at the end of the buffer may become a call.
            lengths = range(len(begin) - 1, 0, -1)
            output += self._take_buffer(next((n for n in lengths if self._buffer.endswith(begin[:n])), 0))
        return output, pieces

    @property
    def _has_all_calls(self) -> bool:
        """Whether an answer that makes at most one call has made it."""
        return self.tool_calls.single and self.calls > 0

    def _parse_object(self, final: bool) -> tuple[str, list[CallPiece]]:
        """`read` for an answer that is a call if all of it is an object."""
        beginning = self._buffer.lstrip()
        self._is_text |= bool(beginning) and not beginning.startswith("{")
        if self._is_text:
            return self._take_buffer(), []
        if not final:
            return "", []
        call = self._parse_call(self._buffer)
        return (self._take_buffer(), []) if call is None else ("", [call])

    def _take_buffer(self, keep: int = 0) -> str:
        """Remove and return the buffer but for its last `keep` characters."""
        end = len(self._buffer) - keep
        text = self._buffer[:end]
        self._buffer = self._buffer[end:]
        return text

    def _parse_call(self, text: str) -> CallPiece | None:
        """A new call from its JSON text. Returns None if it does not call a known tool."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get(self.tool_calls.format.arguments) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or name not in [tool.name for tool in self.tool_calls.tools]:
            return None
        return self._new_call(name, json.dumps(arguments, ensure_ascii=False))

    def _new_call(self, name: str, arguments: str) -> CallPiece:
        """The first piece of a new call, with a random id."""
        piece = CallPiece(self.calls, arguments, f"call_{secrets.token_hex(12)}", name)
        self.calls += 1
        return piece
