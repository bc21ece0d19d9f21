"""Kinds of parts and tools that other APIs know and no served model does: each refused in a sentence."""

from collections.abc import Mapping
from typing import Any

from remask.errors import ConfigError

_TEXT = "the models read and write text alone, so say in text what the model should know"
_KEPT = "nothing is kept beyond an answer, so send what is referred to"
_SERVER = "the server runs no tools: offer a function, and run it where its call arrives"
_TEXT_KINDS = {"image", "input_image", "image_url", "input_file", "file", "document", "input_audio", "audio"}
_KEPT_KINDS = {"item_reference", "container_upload", "compaction"}


def known_kind(where: str, value: Any, known: frozenset[str], why: str | None = None) -> Any:
    """`value`, an object whose `type` may be one of `known`. Raises `ConfigError` that says why another may not.

    Anything but an object with a text as its `type` is returned as it is.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind in known:
        return value
    reason = why or (_TEXT if kind in _TEXT_KINDS else _KEPT if kind in _KEPT_KINDS else None)
    allowed = ", ".join(map(repr, sorted(known)))
    raise ConfigError(
        f"{where}: the type {kind[:64]!r} is not supported{f', as {reason}' if reason else ''}; send {allowed}"
    )


def known_tool(value: Any, known: frozenset[str]) -> Any:
    """The same of a tool."""
    return known_kind("tools", value, known, _SERVER)


def without(value: Any, *names: str) -> Any:
    """An object without fields that are null or among `names`, which ask for nothing; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    return {name: each for name, each in value.items() if each is not None and name not in names}
