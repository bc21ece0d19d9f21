"""What OpenAI's decisions are about: a list of messages, calls of tools and their outputs, and the parts of texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from remask.checks.values import Text, Values, count_values, parse_json, shown
from remask.errors import ConfigError, UnknownNameError

MAX_ITEMS = 2**12
MAX_PARTS = 2**10
"""Of one message, output or question."""
MAX_VALUES = 2**18
"""Of a whole list, nested ones included."""
MAX_LEVELS, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 256 << 10
"""Of one JSON part."""

TEXT, JSON, IMAGE = "input_text", "input_json", "input_image"
PARTS = (TEXT, JSON, IMAGE)
# Types of parts, and the field of their content.
_TEXT_PARTS = {TEXT: "text"}
_ASSISTANT_PARTS = {"output_text": "text", "refusal": "refusal"}
_PARTS_BY_ROLE = {"assistant": _ASSISTANT_PARTS, "user": {TEXT: "text", JSON: "data"}}
_TEXT = Text(2**24, empty=True)
_NAME = Text(1024)
_BREAKPOINT = "prompt_cache_breakpoint"

REASONING = "reasoning"  # items of this type are ignored, as no served model reads them
_MESSAGE_FIELDS: Final = {"role", "content"}
_ITEMS: Final = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
_CALLS: Final = ("function_call", "custom_tool_call")
_IGNORED_FIELDS = {"type", "id", "status", "phase"}  # no model reads them
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def text_of(value: Any) -> str:
    """A text, or a JSON value as the model reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of a past call: an empty object if there are none, the text itself if it is no JSON object.

    Raises nothing: a past call that was cut off or is no JSON must not end a conversation.
    """
    try:
        value = parse_json(text, finite=True) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    if value is None:
        return {}
    return value if isinstance(value, dict) else text


@dataclass(frozen=True, slots=True)
class Transcripts(Values):
    """Texts, and lists of messages, calls of tools and their outputs."""

    @property
    def words(self) -> str:
        return f"a text, or a list of at most {MAX_ITEMS} messages, calls of tools and their outputs"

    def fits(self, value: object) -> bool:
        """Whether `value` is a text or list of an allowed size. The items of a list are checked by `Transcript.of`."""
        if isinstance(value, list | tuple):
            return 0 < len(value) <= MAX_ITEMS and count_values(value, MAX_VALUES) <= MAX_VALUES
        return _TEXT.fits(value)

    def schema(self) -> dict[str, Any]:
        item = {"type": "object", "maxProperties": 16}
        return {"anyOf": [_TEXT.schema(), {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_ITEMS}]}


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation.

    Attributes:
        messages: in the form that chat templates read, with calls as `tool_calls` and their outputs in the role `tool`.
        shared: the messages up to the last part with a `prompt_cache_breakpoint`; None if no part has one.
    """

    messages: tuple[Mapping[str, Any], ...]
    shared: tuple[Mapping[str, Any], ...] | None = None

    @classmethod
    def of_text(cls, text: str) -> "Transcript":
        """A conversation of one system message; of no message if `text` is empty."""
        return cls(({"role": "system", "content": text},) if text else ())

    @property
    def chars(self) -> int:
        """Characters of its texts and calls."""
        calls = [text_of(call["function"]) for message in self.messages for call in message.get("tool_calls", ())]
        return sum(len(message["content"]) for message in self.messages) + sum(map(len, calls))

    @classmethod
    def of(cls, items: Sequence[Any]) -> "Transcript":
        """Build the conversation of a list of items. Raises `ConfigError`, which names the first bad item."""
        messages: list[dict[str, Any]] = []
        calls: dict[str, tuple[str, str]] = {}  # type and function name by the id of a call
        shared: tuple[Mapping[str, Any], ...] | None = None
        for index, item in enumerate(items):
            path = f"input[{index}]"
            item_type = _item_type(path, item)
            if item_type == REASONING:
                continue
            if item_type in _CALLS:
                _add_call(path, item_type, item, messages, calls)
                continue
            if item_type == "message":
                message, shared_text = _read_message(path, item)
            else:
                message, shared_text = _read_output(path, item, calls)
            messages.append(message)
            if shared_text is not None:
                shared = (*messages[:-1], {**message, "content": shared_text})
        return cls(tuple(messages), shared)


def without_tools(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` for a chat template without tools: calls are texts of the assistant, outputs of the user."""
    plain_messages = []
    for message in messages:
        text = message["content"]
        if message["role"] == "tool":
            plain_messages.append({"role": "user", "content": f"{message['name']} returned: {text}"})
            continue
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [f"{function['name']}({text_of(function['arguments'])})" for function in functions]
        plain_messages.append({"role": message["role"], "content": "\n".join(filter(None, [text, *calls]))})
    return plain_messages


def is_parts(value: object) -> bool:
    """Whether a value is a list of parts, as OpenAI's questions have them."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(part, Mapping) and part.get("type") in PARTS for part in value)


def has_image(value: object) -> bool:
    """Whether a question's instructions hold an image, which no served model sees."""
    return is_parts(value) and any(part["type"] == IMAGE for part in value)  # type: ignore[attr-defined]


def instructions_text(path: str, value: Any) -> str:
    """Return the text of a question's instructions, a text or a list of parts. Raises `ConfigError` on other values."""
    return _read_content(path, value, {TEXT: "text", JSON: "data", IMAGE: "image_url"})[0]


def _item_type(path: str, item: Any) -> str:
    """Return the type of an item. Raises `ConfigError` on unknown types, and on unknown fields of a message."""
    if not isinstance(item, Mapping):
        raise ConfigError(f"{path} must be an object, got {shown(item)}")
    item_type = item.get("type", "message")
    if not isinstance(item_type, str) or item_type not in (*_ITEMS, REASONING):
        raise ConfigError(f"{path}.type must be one of {', '.join(_ITEMS)}, got {shown(item_type)}")
    # Clients send a model's own messages back as they got them, with fields of any name.
    if item_type == "message" and item.get("role") != "assistant":
        _check_known_fields(path, item, _MESSAGE_FIELDS | _IGNORED_FIELDS)
    return item_type


def _read_message(path: str, item: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the message of an item, and its text up to the last breakpoint or None. Raises `ConfigError`."""
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ConfigError(f"{path}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
    text, shared_text = _read_content(f"{path}.content", item.get("content"), _PARTS_BY_ROLE.get(role, _TEXT_PARTS))
    return {"role": _ROLES[role], "content": text}, shared_text


def _read_output(
    path: str, item: Mapping[str, Any], calls: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, Any], str | None]:
    """Return the message of a tool's output, and its text up to the last breakpoint or None.

    Raises `ConfigError` if the output belongs to none of the `calls` before it.
    """
    call_id = item.get("call_id")
    output_type = item["type"].removesuffix("_output")
    call_type, name = calls.get(call_id, ("", "")) if isinstance(call_id, str) else ("", "")
    if call_type != output_type:
        raise ConfigError(f"{path}.call_id must be that of a {output_type} before it, got {shown(call_id)}")
    text, shared_text = _read_content(f"{path}.output", item.get("output"), _TEXT_PARTS)
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": name}, shared_text


def _check_known_fields(path: str, value: Mapping[str, Any], names: set[str]) -> None:
    for name, field in value.items():
        if name not in names and field is not None:
            raise UnknownNameError("field", str(name)[:64], sorted(names), f"{path}.")


def _add_call(
    path: str,
    item_type: str,
    fields: Mapping[str, Any],
    messages: list[dict[str, Any]],
    calls: dict[str, tuple[str, str]],
) -> None:
    """Add a call to the last message, or to a new one if that is not the assistant's. Writes `messages` and `calls`."""
    argument_field = "input" if item_type == "custom_tool_call" else "arguments"
    text = (
        "" if fields.get(argument_field) is None else _checked_text(f"{path}.{argument_field}", fields[argument_field])
    )
    call_id, name = fields.get("call_id"), fields.get("name")
    for field, values, value in (("call_id", _NAME, call_id), ("name", _NAME, name), (argument_field, _TEXT, text)):
        values.check(f"{path}.{field}", value)
    assert isinstance(call_id, str)
    assert isinstance(name, str)
    if call_id in calls:
        raise ConfigError(f"{path}.call_id: {shown(call_id)} is that of another call; each needs its own")
    calls[call_id] = item_type, name
    arguments = read_arguments(text) if item_type == "function_call" else text
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    tool_call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), tool_call]


def _read_content(path: str, content: Any, part_types: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the text of a content, with every part on lines of its own, and the text up to its last breakpoint.

    The second is None without a breakpoint. `part_types` maps the types that parts may have to the field that is read.
    Raises `ConfigError` on other contents.
    """
    if isinstance(content, str):
        _TEXT.check(path, content)
        return content, None
    if not isinstance(content, list | tuple) or not 0 < len(content) <= MAX_PARTS:
        raise ConfigError(f"{path} must be a text, or a list of 1 to {MAX_PARTS} parts, got {shown(content)}")
    texts: list[str] = []
    shared_text = None
    for index, part in enumerate(content):
        part_path = f"{path}[{index}]"
        texts.append(_read_part(part_path, part, part_types))
        breakpoint_value = part.get(_BREAKPOINT)
        if breakpoint_value is not None:
            if breakpoint_value != {"mode": "explicit"}:
                raise ConfigError(
                    f'{part_path}.{_BREAKPOINT} must be {{"mode": "explicit"}}, got {shown(breakpoint_value)}'
                )
            shared_text = "\n".join(texts)
    return "\n".join(texts), shared_text


def _read_part(path: str, part: Any, part_types: Mapping[str, str]) -> str:
    """Return the text of one part. Raises `ConfigError` on parts of other types, with other fields or bad values."""
    part_type = part.get("type") if isinstance(part, Mapping) else None
    if part_type == IMAGE and IMAGE not in part_types:
        raise ConfigError(f"{path} is an image, and the served models read text alone; say in text what it shows")
    if not isinstance(part_type, str) or part_type not in part_types:
        raise ConfigError(f"{path} must be an object whose type is one of {', '.join(part_types)}, got {shown(part)}")
    field = part_types[part_type]
    if part_types is not _ASSISTANT_PARTS:
        _check_known_fields(path, part, {"type", field, _BREAKPOINT, *(["detail"] if part_type == IMAGE else [])})
    value = part.get(field)
    if part_type == JSON:
        return _json_text(f"{path}.data", value)
    _TEXT.check(f"{path}.{field}", value)
    assert isinstance(value, str)
    return value


def _json_text(path: str, data: Any) -> str:
    """Return the text of a JSON part. Raises `ConfigError` if it is larger than OpenAI's documentation allows."""
    objects = data if isinstance(data, list | tuple) else [data]
    if not all(isinstance(value, Mapping) for value in objects):
        raise ConfigError(f"{path} must be an object or a list of objects, got {shown(data)}")
    if count_values(data, MAX_JSON_VALUES) > MAX_JSON_VALUES:
        raise ConfigError(f"{path} holds more than {MAX_JSON_VALUES} values; send fewer, or several parts")
    if _nesting_depth(data) > MAX_LEVELS:
        raise ConfigError(f"{path} nests more than {MAX_LEVELS} levels of lists and objects; send flatter values")
    text = _checked_text(path, data)
    compact = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if not _TEXT.fits(compact):
        raise ConfigError(f"{path} holds a text that is not valid Unicode")
    if (size := len(compact.encode())) > MAX_JSON_BYTES:
        raise ConfigError(f"{path} has {size} bytes as compact JSON; at most {MAX_JSON_BYTES} are taken")
    return text


def _checked_text(path: str, value: Any) -> str:
    """Return `text_of` a value. Raises `ConfigError` if it is no JSON, as a caller in Python may send it."""
    try:
        return text_of(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be a text or JSON, got {shown(value)}: {error}; send what JSON has") from error


def _nesting_depth(data: Any) -> int:
    """Return how deeply lists and objects are nested; counting stops beyond `MAX_LEVELS`."""
    depth = 0
    values = [data]
    while depth <= MAX_LEVELS:
        containers = [value for value in values if isinstance(value, Mapping | list | tuple)]
        if not containers:
            break
        depth += 1
        values = []
        for container in containers:
            values += container.values() if isinstance(container, Mapping) else container
    return depth
