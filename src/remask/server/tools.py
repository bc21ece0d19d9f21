"""Calls of tools: how an answer must be written that calls one, and how calls are read from answers."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from remask.checks.values import parse_json, shown
from remask.errors import ConfigError
from remask.request.forms import FormSource, StructuredOutputs
from remask.request.json_schema import escape

if TYPE_CHECKING:  # it imports PyTorch, and the process that reads bodies imports this module
    from remask.answers.answer import SettledToken

ForcedCalls: TypeAlias = Literal["named", "required", "choice"]


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
        forced: the form that the answer is held to: a call of one tool ("named"), a call of any ("required"), or calls
            or text ("choice"). None: calls are found in the text of the answer.
        single: an answer makes at most one call.
        format: how calls are written.
        text_form: with "choice", the form of an answer in text, if the request asks for one.
    """

    tools: Sequence[Tool]
    forced: ForcedCalls | None
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
        text = f"([^{begin[0]}](?s:.)*)?" if self.text_form is None else f"({self.text_form.source.expression})"
        call = f"{escape(begin)}({form.source.expression}){escape(end)}"
        return _Choice(json=form.json, pattern=f"{call}|{text}" if self.single else f"({call}\\n?)+|{text}")


@dataclass(frozen=True)
class _Choice(StructuredOutputs):
    """Calls between their affixes, or text, as a regular expression."""

    pattern: str = ""

    @property
    def source(self) -> FormSource:
        return FormSource("json", self.pattern or super().source.expression)


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
class TextPiece:
    """A run of an answer's text outside calls, which begins at the character `start` of what the model wrote.

    `scored_tokens` are the tokens that have a character in it, and those without text before or behind one.
    """

    text: str
    start: int
    scored_tokens: list["SettledToken"] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The character behind its last one."""
        return self.start + len(self.text)


@dataclass(slots=True)
class CallReader:
    """Reads calls from the text of one answer as it settles. Everything else stays text.

    A call whose arguments fill a hole is returned piece by piece, any other once it is complete. Text between the
    affixes of a call that is not an object, or that names an unknown tool, is returned unchanged.
    """

    tool_calls: ToolCalls
    call_count: int = 0
    _buffer: str = ""  # text that is not read yet; a call that has begun is read with its end
    _position: int = 0  # where the buffer begins in the answer
    _in_call: bool = False  # the buffer begins with the beginning of a call
    _after_call: bool = False  # the end of a call was read, and nothing but line ends since
    _is_text: bool = False  # text was read that cannot begin a call
    _ends_in_text: bool = True  # no call was read after the last text
    _pieces: list[TextPiece | CallPiece] = field(default_factory=list)  # what the current `read` returns
    _undecided: list["SettledToken"] = field(default_factory=list)  # tokens that may be of a text or of a call

    def finish_reason(self, reason: str) -> str:
        """OpenAI's name for the finish reason `reason`: "tool_calls" if the model chose to make calls."""
        return "tool_calls" if self.call_count and self.tool_calls.forced != "named" else reason

    def read(
        self, text: str, scored_tokens: Sequence["SettledToken"] = (), *, final: bool
    ) -> Sequence[TextPiece | CallPiece]:
        """Take new text and its tokens, the last ones if `final`. Returns pieces in the order of the answer."""
        self._pieces = []
        self._buffer += text
        if self.tool_calls.forced in ("named", "required"):
            self._read_forced(final)
        else:
            self._read_free(final)
        self._assign_tokens([*self._undecided, *scored_tokens], final)
        return self._pieces

    def _read_forced(self, final: bool) -> None:
        """Read the buffer of an answer that is the hole of a call."""
        tools = self.tool_calls.tools
        if len(tools) > 1:
            if final:
                self._take_call(len(self._buffer), self._parse_call(self._buffer))
        # Clients expect one piece of each call in a step.
        elif not self.call_count:
            self._take_call(len(self._buffer), self._new_call(tools[0].name, self._buffer))
        elif self._buffer:
            self._take_call(len(self._buffer), CallPiece(0, self._buffer))

    def _read_free(self, final: bool) -> None:
        """Read the buffer of an answer that may hold text and calls."""
        if self._has_all_calls:
            self._skip(len(self._buffer))
            return
        begin = self.tool_calls.format.begin
        if not begin:
            beginning = self._buffer.lstrip()
            self._is_text |= bool(beginning) and not beginning.startswith("{")
        elif self._buffer and self.tool_calls.forced == "choice" and not (self.call_count or self._in_call):
            self._is_text |= not self._buffer.startswith(begin[0])
        if self._is_text:
            self._take_text(len(self._buffer))
        elif begin:
            self._read_between_affixes(begin.strip(), self.tool_calls.format.end.strip(), final)
        elif final:
            self._take_call(len(self._buffer), self._parse_call(self._buffer))

    def _read_between_affixes(self, begin: str, end: str, final: bool) -> None:
        """Read the calls in the buffer that have their `end`, and the text around them.

        Unless `final`, the buffer keeps the beginning of a call, and of `begin`.
        """
        while not self._has_all_calls:
            if self._after_call:  # line ends between calls are no text
                self._skip(len(self._buffer) - len(self._buffer.lstrip("\n")))
                self._after_call = not self._buffer
            if self._in_call:
                stop = self._buffer.find(end, len(begin))
                if stop < 0:
                    break
                call = self._parse_call(self._buffer[len(begin) : stop])
                self._take_call(stop + len(end), call)
                self._after_call = call is not None
            else:
                start = self._buffer.find(begin)
                if start < 0:
                    break
                self._take_text(start)
            self._in_call = not self._in_call
        length = len(self._buffer)
        if self._has_all_calls:
            self._skip(length)
        elif final:
            self._take_text(length)
        elif not self._in_call:
            lengths = range(len(begin) - 1, 0, -1)
            overlap = next((n for n in lengths if self._buffer.endswith(begin[:n])), 0)
            self._take_text(length - overlap)

    @property
    def _has_all_calls(self) -> bool:
        """Whether an answer that makes at most one call has made it."""
        return self.tool_calls.single and self.call_count > 0

    def _take_text(self, length: int) -> None:
        """Move the first `length` characters of the buffer into the text of the answer."""
        if not length:
            return
        text = self._buffer[:length]
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, TextPiece) and last.stop == self._position:
            last.text += text
        else:
            self._pieces.append(TextPiece(text, self._position))
        self._skip(length)
        self._ends_in_text = True

    def _take_call(self, length: int, call: CallPiece | None) -> None:
        """Move the first `length` characters of the buffer into the answer: as `call`, or as text if it is None."""
        if call is None:
            self._take_text(length)
            return
        self._pieces.append(call)
        self._skip(length)
        self._ends_in_text = False

    def _skip(self, length: int) -> None:
        """Remove the first `length` characters from the buffer."""
        self._buffer = self._buffer[length:]
        self._position += length

    def _assign_tokens(self, scored_tokens: Sequence["SettledToken"], final: bool) -> None:
        """Add each token to the piece of text that it belongs to. Drops tokens of calls, and keeps those of neither.

        If the answer ends in text, the last piece gets the `final` tokens behind it, such as an end token.
        """
        self._undecided = []
        texts = [piece for piece in self._pieces if isinstance(piece, TextPiece)]
        for token in scored_tokens:
            # A token that adds no text may begin the next character.
            end = max(token.end, token.offset + 1)
            text = next((text for text in texts if text.start < end and token.offset < text.stop), None)
            if text is not None:
                text.scored_tokens.append(token)
            elif not final:
                if end > self._position:
                    self._undecided.append(token)
            elif token.offset >= self._position and self._ends_in_text:
                if not texts:
                    texts.append(TextPiece("", self._position))
                    self._pieces.append(texts[0])
                texts[-1].scored_tokens.append(token)

    def _parse_call(self, text: str) -> CallPiece | None:
        """A new call from its JSON text. Returns None if it does not call a known tool."""
        try:
            value = parse_json(text, finite=True)  # arguments with NaN would be no JSON for the client
        except ValueError:
            return None
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get(self.tool_calls.format.arguments) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or name not in [tool.name for tool in self.tool_calls.tools]:
            return None
        return self._new_call(name, json.dumps(arguments, ensure_ascii=False))

    def _new_call(self, name: str, arguments: str) -> CallPiece:
        """The first piece of a new call, with a random id."""
        piece = CallPiece(self.call_count, arguments, f"call_{secrets.token_hex(12)}", name)
        self.call_count += 1
        return piece
