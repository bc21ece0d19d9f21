"""JSONL files of local data. Each line is checked field by field."""

import gzip
import io
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remask.checks.values import check_choice, json_object
from remask.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Line:
    """One object of a data file.

    Attributes:
        where: the file and the line's number, for errors.
        record: the object.
        names: the file's name of each field that it calls by another name.
    """

    where: str
    record: Mapping[str, Any]
    names: Mapping[str, str]

    def has(self, field: str) -> bool:
        """Whether the object has the field."""
        return self.names.get(field, field) in self.record

    def get(self, field: str) -> Any:
        """The field's value. Raises `ConfigError`, which names the line and the field, where it is missing."""
        name = self.names.get(field, field)
        if name not in self.record:
            keys = ", ".join(self.record) or "none"
            raise self.error(f"has no field {name!r}; its fields: {keys}. --fields {field}=NAME says what it is called")
        return self.record[name]

    def text(self, field: str) -> str:
        """The field's value, a text that is not empty. Raises as `get`."""
        value = self.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"field {self.names.get(field, field)!r} must be a text that is not empty, got {value!r}")
        return value

    def texts(self, field: str) -> list[str]:
        """The field's value, a list of texts. Raises as `get`."""
        value = self.get(field)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.error(f"field {self.names.get(field, field)!r} must be a list of texts, got {value!r}")
        return value

    def exchange(self) -> tuple[str, str]:
        """The texts of a user's and an assistant's message, the two of `messages`, as packaged tasks hold them.

        Raises as `get`.
        """
        messages = self.get("messages")
        try:
            turns = {str(message["role"]): str(message["content"]) for message in messages}
        except (TypeError, KeyError):
            turns = {}
        if list(turns) != ["user", "assistant"] or len(messages) != 2:
            raise self.error(f"field 'messages' must be a user's and an assistant's message, got {messages!r}")
        return turns["user"], turns["assistant"]

    def error(self, what: str) -> ConfigError:
        """Returns an error about this line."""
        return ConfigError(f"{self.where} {what}")


def read_lines(path: str | Path, names: Mapping[str, str] | None = None, limit: int | None = None) -> Iterator[Line]:
    """Yields the objects of a `.jsonl` or `.jsonl.gz` file, at most `limit`. Blank lines are skipped.

    Raises `ConfigError` where the file cannot be read, holds no line, or holds a line that is no JSON object.
    """
    try:
        data = Path(path).read_bytes()
        content = (gzip.decompress(data) if Path(path).suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"the data {str(path)!r} cannot be read: {reason or error}") from error
    count = 0
    # As in files: texts within JSON may hold the further characters at which `splitlines` splits.
    for number, text in enumerate(io.StringIO(content, newline=None), start=1):
        if not text.strip():
            continue
        if limit is not None and count == limit:
            return
        count += 1
        yield Line(f"{path}, line {number}:", json_object(f"{path}, line {number}", text), names or {})
    if not count:
        raise ConfigError(f"the data {str(path)!r} holds no lines")


def field_names(option: str, text: str | None, known: Collection[str]) -> dict[str, str]:
    """The file's names of the `known` fields, from "field=name,field=name". Raises `ConfigError` on other text."""
    names = {}
    for part in text.split(",") if text else ():
        field, separator, name = (piece.strip() for piece in part.partition("="))
        if not separator or not name:
            raise ConfigError(f"{option} takes FIELD=NAME,FIELD=NAME, got {part.strip()!r}")
        check_choice("field", field, known)
        names[field] = name
    return names
