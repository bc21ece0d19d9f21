"""What OpenAI's decisions are about: a list of messages, calls of tools and their outputs, and the parts of texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from remask.checks.values import Text, Values, parsed_json, shown, weight
from remask.errors import ConfigError, UnknownNameError

MAX_ITEMS = 2**12
MAX_PARTS = 2**10
"""Of one message, output or question."""
MAX_VALUES = 2**18
"""Of a whole list, those within others included."""
MAX_LEVELS, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 256 << 10
"""Of one JSON part."""

TEXT, JSON, IMAGE = "input_text", "input_json", "input_image"
PARTS = (TEXT, JSON, IMAGE)
_ANSWERED = {
    "output_text": "text",
    "refusal": "refusal",
}  # the parts of an assistant's message, and where their text is
_TEXT = Text(2**24, empty=True)
_NAME = Text(1024)
_MARK = "prompt_cache_breakpoint"

REASONING = "reasoning"  # items of this type are ignored, as no served model reads them
_MESSAGE: Final = {"role", "content"}
_ITEMS: Final = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
_SILENT = {"type", "id", "status", "phase"}  # say nothing to a model
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def text_of(value: Any) -> str:
    """A text, or a JSON value as the model reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_arguments(text: str) -> dict[str, Any] | str:
    """The arguments of a past call: an empty object where there are none, and the text itself where it is no object.

    A call that was cut off, or is no JSON for another reason, is history: it never ends a conversation.
    """
    try:
        value = parsed_json(text, finite=True) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value if isinstance(value, dict) else text


@dataclass(frozen=True, slots=True)
class Transcripts(Values):
    """Texts, and lists of messages, calls of tools and their outputs."""

    @property
    def words(self) -> str:
        return f"a text, or a list of at most {MAX_ITEMS} messages, calls of tools and their outputs"

    def fits(self, value: object) -> bool:
        """Whether it is a text or a list of a size that is read; `Transcript.of` says what is wrong with items."""
        if isinstance(value, list | tuple):
            return 0 < len(value) <= MAX_ITEMS and weight(value, MAX_VALUES) <= MAX_VALUES
        return _TEXT.fits(value)

    def schema(self) -> dict[str, Any]:
        item = {"type": "object", "maxProperties": 16}
        return {"anyOf": [_TEXT.schema(), {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_ITEMS}]}


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation.

    Attributes:
        messages: in the form that chat templates read, with calls as `tool_calls` and their outputs in the role `tool`.
        marked: the same up to the last part with a `prompt_cache_breakpoint`; None where no part has one.
    """

    messages: tuple[Mapping[str, Any], ...]
    marked: tuple[Mapping[str, Any], ...] | None = None

    @classmethod
    def of_text(cls, text: str) -> "Transcript":
        """That of a text, which is one message; none is of nothing."""
        return cls(({"role": "system", "content": text},) if text else ())

    @property
    def chars(self) -> int:
        """Characters of its texts and calls."""
        calls = [text_of(call["function"]) for message in self.messages for call in message.get("tool_calls", ())]
        return sum(len(message["content"]) for message in self.messages) + sum(map(len, calls))

    @classmethod
    def of(cls, items: Sequence[Any]) -> "Transcript":
        """The conversation of a list of items. Raises `ConfigError`, which names the first item that is wrong."""
        messages: list[dict[str, Any]] = []
        calls: dict[str, tuple[str, str]] = {}
        marked: tuple[Mapping[str, Any], ...] | None = None
        for place, item in enumerate(items):
            where = f"input[{place}]"
            kind, fields = _item(where, item)
            if kind == REASONING:
                continue
            if kind == "message":
                role = fields.get("role")
                if not isinstance(role, str) or role not in _ROLES:
                    raise ConfigError(f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
                content, read = fields.get("content"), _parts_of(role)
            elif kind.endswith("_output"):
                call, made = fields.get("call_id"), kind.removesuffix("_output")
                if not isinstance(call, str) or calls.get(call, ("", ""))[0] != made:
                    raise ConfigError(f"{where}.call_id must be that of a {made} before it, got {shown(call)}")
                role, content, read = "tool", fields.get("output"), {TEXT: "text"}
            else:
                _add_call(where, kind, fields, messages, calls)
                continue
            text, end = _content(f"{where}.{'content' if kind == 'message' else 'output'}", content, read)
            said = {"role": _ROLES.get(role, "tool"), "content": text}
            if kind != "message":
                said |= {"tool_call_id": fields["call_id"], "name": calls[fields["call_id"]][1]}
            messages.append(said)
            if end is not None:
                marked = (*messages[:-1], {**said, "content": end})
        return cls(tuple(messages), marked)


def without_tools(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` for a template that tells nothing of tools: calls and outputs are texts of the two sides."""
    told = []
    for message in messages:
        text = message["content"]
        if message["role"] == "tool":
            told.append({"role": "user", "content": f"{message['name']} returned: {text}"})
            continue
        calls = [each["function"] for each in message.get("tool_calls", ())]
        texts = [f"{each['name']}({text_of(each['arguments'])})" for each in calls]
        told.append({"role": message["role"], "content": "\n".join(filter(None, [text, *texts]))})
    return told


def is_parts(value: object) -> bool:
    """Whether a value is a list of parts, as OpenAI's questions have them."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(each, Mapping) and each.get("type") in PARTS for each in value)


def has_image(value: object) -> bool:
    """Whether a question's instructions hold an image, which no served model sees."""
    return is_parts(value) and any(part["type"] == IMAGE for part in value)  # type: ignore[attr-defined]


def written(where: str, value: Any) -> str:
    """The text of a question's instructions: a text, or parts. Raises `ConfigError`."""
    return _content(where, value, {TEXT: "text", JSON: "data", IMAGE: "image_url"})[0]


def _parts_of(role: str) -> Mapping[str, str]:
    if role == "assistant":
        return _ANSWERED
    return {TEXT: "text", JSON: "data"} if role == "user" else {TEXT: "text"}


def _item(where: str, item: Any) -> tuple[str, Mapping[str, Any]]:
    """The type and the fields of an item."""
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where} must be an object, got {shown(item)}")
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in (*_ITEMS, REASONING):
        raise ConfigError(f"{where}.type must be one of {', '.join(_ITEMS)}, got {shown(kind)}")
    if kind == "message" and item.get("role") != "assistant":  # what a model made comes as clients got it
        _known(where, item, _MESSAGE | _SILENT)
    return kind, item


def _known(where: str, value: Mapping[str, Any], known: set[str]) -> None:
    for name, field in value.items():
        if name not in known and field is not None:
            raise UnknownNameError("field", str(name)[:64], sorted(known), f"{where}.")


def _add_call(
    where: str,
    kind: str,
    fields: Mapping[str, Any],
    messages: list[dict[str, Any]],
    calls: dict[str, tuple[str, str]],
) -> None:
    """Add a call to the assistant's message at the end, which is begun where another one stands there."""
    said = "input" if kind == "custom_tool_call" else "arguments"
    text = "" if fields.get(said) is None else text_of(fields[said])
    call, name = fields.get("call_id"), fields.get("name")
    for field, values, value in (("call_id", _NAME, call), ("name", _NAME, name), (said, _TEXT, text)):
        values.check(f"{where}.{field}", value)
    assert isinstance(call, str)
    assert isinstance(name, str)
    if call in calls:
        raise ConfigError(f"{where}.call_id: {shown(call)} is that of another call; each needs its own")
    calls[call] = kind, name
    arguments = read_arguments(text) if kind == "function_call" else text
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    made = {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), made]


def _content(where: str, content: Any, read: Mapping[str, str]) -> tuple[str, str | None]:
    """The text of a content, each part on lines of its own; and that up to its last breakpoint, if it has one.

    `read` are the types of parts that it may have, and the field of each that is read.
    """
    if isinstance(content, str):
        _TEXT.check(where, content)
        return content, None
    if not isinstance(content, list | tuple) or not 0 < len(content) <= MAX_PARTS:
        raise ConfigError(f"{where} must be a text, or a list of 1 to {MAX_PARTS} parts, got {shown(content)}")
    texts, end = [], None
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == IMAGE and IMAGE not in read:
            raise ConfigError(f"{at} is an image, and the served models read text alone; say in text what it shows")
        if not isinstance(kind, str) or kind not in read:
            raise ConfigError(f"{at} must be an object whose type is one of {', '.join(read)}, got {shown(part)}")
        if read is not _ANSWERED:
            _known(at, part, {"type", read[kind], _MARK, *(["detail"] if kind == IMAGE else [])})
        value = part.get(read[kind])
        texts.append(_json(f"{at}.data", value) if kind == JSON else value)
        if kind != JSON:
            _TEXT.check(f"{at}.{read[kind]}", value)
        if (mark := part.get(_MARK)) is not None:
            if mark != {"mode": "explicit"}:
                raise ConfigError(f'{at}.{_MARK} must be {{"mode": "explicit"}}, got {shown(mark)}')
            end = "\n".join(texts)
    return "\n".join(texts), end


def _json(where: str, data: Any) -> str:
    """The text of a JSON part. Raises `ConfigError` where it is larger than OpenAI's documentation allows."""
    listed = data if isinstance(data, list | tuple) else [data]
    if not all(isinstance(each, Mapping) for each in listed):
        raise ConfigError(f"{where} must be an object or a list of objects, got {shown(data)}")
    if weight(data, MAX_JSON_VALUES) > MAX_JSON_VALUES:
        raise ConfigError(f"{where} holds more than {MAX_JSON_VALUES} values; send fewer, or several parts")
    if _levels(data) > MAX_LEVELS:
        raise ConfigError(f"{where} nests more than {MAX_LEVELS} levels of lists and objects; send flatter values")
    compact = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if not _TEXT.fits(compact):
        raise ConfigError(f"{where} holds a text that is not valid Unicode")
    if (size := len(compact.encode())) > MAX_JSON_BYTES:
        raise ConfigError(f"{where} has {size} bytes as compact JSON; at most {MAX_JSON_BYTES} are taken")
    return text_of(data)


def _levels(data: Any) -> int:
    """How many lists and objects stand within each other; the counting ends beyond `MAX_LEVELS`."""
    level, count = [data], 0
    while level and count <= MAX_LEVELS:
        held = [each for each in level if isinstance(each, Mapping | list | tuple)]
        level = [each for one in held for each in (one.values() if isinstance(one, Mapping) else one)]
        count += bool(held)
    return count
