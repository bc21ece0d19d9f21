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
        begin: what stands before the object; "" where an answer that is an object is a call.
        end: what stands behind it.
        arguments: the key of the arguments.
    """

    begin: str
    end: str
    arguments: str

    def around(self, name: str) -> tuple[str, str]:
        """What stands before and behind the arguments of a call of the tool `name`."""
        return f'{self.begin}{{"name": {json.dumps(name)}, "{self.arguments}": ', f"}}{self.end}"


# Of Hermes, which Qwen 2.5 and 3 took over, and so what began as them (Dream, Fast-dLLM v2, SDAR).
HERMES = CallFormat("<tool_call>\n", "\n</tool_call>", "arguments")
# Of Llama 3.1 and later.
LLAMA = CallFormat("", "", "parameters")


_SAY_PROPERTIES = frozenset(
    ["$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "oneOf", "properties", "propertyNames"]
)
"""Keywords that say what arguments there may be. Without any of them there are none."""


def format_of(template: str | None) -> CallFormat:
    """The format that a chat template teaches, or by default Hermes'."""
    if template is None or "tools" not in template or HERMES.begin.strip() in template:
        return HERMES
    return LLAMA


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call. `parameters` is a JSON schema of an object; None takes no arguments."""

    name: str
    parameters: Mapping[str, Any] | None

    @property
    def form(self) -> Mapping[str, Any]:
        """The schema of its arguments. Raises `ConfigError` where they are no object."""
        schema = dict(self.parameters or {})
        kinds = schema.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise ConfigError(
                f"tools: the parameters of {self.name!r} have the type {shown(kinds)}, and arguments are an object; "
                "send the type 'object', and what is meant as one of its properties"
            )
        if not _SAY_PROPERTIES & schema.keys():
            schema["properties"] = {}
        return schema | {"type": "object"}


@dataclass(frozen=True)
class ToolCalls:
    """What a request says of calls.

    Attributes:
        tools: those that may be called.
        forced: a call must be made: of the tool that is named ("named"), or of any ("required"). With "choice" the
            form of the answer is that of words or of calls. None leaves it open, and calls are read where there are.
        single: an answer makes one call at most.
        format: how calls are written.
    """

    tools: Sequence[Tool]
    forced: Literal["named", "required", "choice"] | None
    single: bool
    format: CallFormat
    words: StructuredOutputs | None = None  # the form of an answer in words, where the request asks for one

    @property
    def around(self) -> tuple[str, str] | None:
        """What stands before and behind the hole of an answer whose call is forced; None where none is."""
        if self.forced == "choice":
            return None
        if len(self.tools) == 1:
            return self.format.around(self.tools[0].name)
        return self.format.begin, self.format.end

    @cached_property
    def constraint(self) -> StructuredOutputs:
        """The form of that hole: arguments of the one tool, or a call of one of several; or that of a choice.

        Raises `ConfigError` on schemas that cannot be guaranteed.
        """
        alone = [_guaranteed(tool.form, f"the parameters of {tool.name!r}") for tool in self.tools]
        if len(alone) == 1 and self.forced != "choice":
            return alone[0]
        calls = []
        for tool in self.tools:
            # With an `$id` of its own the references in a schema are relative to it.
            arguments = {"$id": f"tool:{tool.name}", **tool.form}
            properties = {"name": {"const": tool.name}, self.format.arguments: arguments}
            calls.append({"type": "object", "properties": properties, "required": list(properties)})
        form = _guaranteed({"anyOf": calls}, "all of them together, of which one is called,")
        if self.forced != "choice":
            return form
        # One call or several, or else words: any text that does not begin as a call does.
        begin, end = self.format.begin, self.format.end
        words = f"([^{begin[0]}](?s:.)*)?" if self.words is None else f"({self.words.source[1]})"
        call = f"{escape(begin)}({form.source[1]}){escape(end)}"
        return _Choice(json=form.json, pattern=f"{call}|{words}" if self.single else f"({call}\\n?)+|{words}")


@dataclass(frozen=True)
class _Choice(StructuredOutputs):
    """Calls, each between its marks, or an answer in words, as a regular expression."""

    pattern: str = ""

    @property
    def source(self) -> tuple[str, str]:
        return "json", self.pattern or super().source[1]


def in_words(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """A conversation for a chat template that knows nothing of tools: these, calls and results as texts, as Hermes'.

    The system's turn tells of the tools; one is put before the others where there is none.
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


def _guaranteed(schema: Mapping[str, Any], what: str) -> StructuredOutputs:
    """The form of a schema. `what` says in errors whose it is."""
    try:
        return StructuredOutputs(json=schema)
    except ConfigError as error:
        reason = str(error).replace("structured_outputs.json", "the schema")
        raise ConfigError(f"tools: {what} cannot be guaranteed: {reason}") from error


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What a step adds to a call: its id and name at first, then text of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    @property
    def streamed(self) -> dict[str, Any]:
        """The piece as OpenAI streams it."""
        named = {} if self.name is None else {"name": self.name}
        opening = {} if self.id is None else {"id": self.id, "type": "function"}
        return {"index": self.index, **opening, "function": {**named, "arguments": self.arguments}}


def whole_calls(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """The calls that pieces make up, as an answer that is not streamed has them."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.id is not None:
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


@dataclass(slots=True)
class CallReader:
    """Reads calls from the text of one answer as it settles. What is no call stays text.

    A call whose arguments stand in a hole is told piece by piece; any other once it is complete. The text within the
    marks of a call that is no object, or names an unknown tool, is given back as it is.
    """

    tool_calls: ToolCalls
    calls: int = 0
    _rest: str = ""  # text that is not read yet
    _within: bool = False  # whether the mark of a call stands before `_rest`
    _behind: bool = False  # whether a call does, and nothing but line ends behind it
    _words: bool = False  # whether text came that begins no object

    def finish_reason(self, reason: str) -> str:
        """OpenAI's name for the end of an answer that ended for `reason`: calls that the model chose to make end it."""
        return "tool_calls" if self.calls and self.tool_calls.forced != "named" else reason

    def read(self, text: str, *, final: bool) -> tuple[str, list[CallPiece]]:
        """Take new text. Returns text of the answer, and pieces of calls; `final` says that no more follows."""
        asked = self.tool_calls
        if asked.forced is None:
            return self._parse(text, final)
        if asked.forced == "choice":
            undecided = self.calls or self._within or not self._rest + text
            self._words |= not undecided and not (self._rest + text).startswith(asked.format.begin[0])
            return (text, []) if self._words else self._parse(text, final)
        if len(asked.tools) == 1:
            if not self.calls:  # one piece a step: clients read one of each index
                return "", [self._begin(asked.tools[0].name, text)]
            return "", [CallPiece(0, text)] if text else []
        self._rest += text
        if not final:
            return "", []
        call = self._call(self._rest)
        return ("", [call]) if call is not None else (self._rest, [])

    def _parse(self, text: str, final: bool) -> tuple[str, list[CallPiece]]:
        self._rest += text
        if self._over:
            self._rest = ""
            return "", []
        if not self.tool_calls.format.begin:
            return self._object(final)
        words, pieces = "", list[CallPiece]()
        begin, end = self.tool_calls.format.begin.strip(), self.tool_calls.format.end.strip()
        while not self._over:
            if self._behind:  # line ends between calls are no text
                self._rest = self._rest.lstrip("\n")
                self._behind = not self._rest
            before, mark, rest = self._rest.partition(end if self._within else begin)
            if not mark:
                break
            self._rest = rest
            if not self._within:
                words += before
            elif (call := self._call(before)) is not None:
                pieces.append(call)
                self._behind = True
            else:
                words += f"{begin}{before}{end}"
            self._within = not self._within
        if self._over:
            self._rest = ""
        elif final:
            words += (begin if self._within else "") + self._take()
        elif not self._within:
            keep = next((n for n in range(len(begin) - 1, 0, -1) if self._rest.endswith(begin[:n])), 0)
            words += self._take(keep)
        return words, pieces

    @property
    def _over(self) -> bool:
        """Whether one call has come, and at most one may."""
        return self.tool_calls.single and self.calls > 0

    def _object(self, final: bool) -> tuple[str, list[CallPiece]]:
        """Of an answer that is an object as a whole, or none."""
        beginning = self._rest.lstrip()
        self._words |= bool(beginning) and not beginning.startswith("{")
        if self._words:
            return self._take(), []
        if not final:
            return "", []
        call = self._call(self._rest)
        return (self._take(), []) if call is None else ("", [call])

    def _take(self, keep: int = 0) -> str:
        """The rest but for its last `keep` characters, which stay."""
        end = len(self._rest) - keep
        text, self._rest = self._rest[:end], self._rest[end:]
        return text

    def _call(self, text: str) -> CallPiece | None:
        """The call that `text` is; None where it is none of a known tool."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get(self.tool_calls.format.arguments) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or name not in [tool.name for tool in self.tool_calls.tools]:
            return None
        return self._begin(name, json.dumps(arguments, ensure_ascii=False))

    def _begin(self, name: str, arguments: str) -> CallPiece:
        piece = CallPiece(self.calls, arguments, f"call_{secrets.token_hex(12)}", name)
        self.calls += 1
        return piece
