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
        names: the names that the file has for fields, by field; fields that are not in it have their own name.
    """

    where: str
    record: Mapping[str, Any]
    names: Mapping[str, str]

    def has(self, field: str) -> bool:
        """Whether the object has the field."""
        return self.names.get(field, field) in self.record

    def get(self, field: str) -> Any:
        """The field's value. Raises `ConfigError` if it is missing; the error names the line and the field."""
        name = self.names.get(field, field)
        if name not in self.record:
            keys = ", ".join(self.record) or "none"
            raise self.error(f"has no field {name!r}; its fields: {keys}. --fields {field}=NAME says what it is called")
        return self.record[name]

    def text(self, field: str) -> str:
        """The field's value, a text that is not blank. Raises `ConfigError` for other values."""
        value = self.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"field {self.names.get(field, field)!r} must be a text that is not empty, got {value!r}")
        return value

    def texts(self, field: str) -> list[str]:
        """The field's value, a list of one text or more. Raises `ConfigError` for other values."""
        value = self.get(field)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.error(f"field {self.names.get(field, field)!r} must be a list of texts, got {value!r}")
        return value

    def exchange(self) -> tuple[str, str]:
        """The texts of the two messages in `messages`: a user's, then an assistant's, as in packaged data sets.

        Raises `ConfigError` for other values.
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
        """An error about this line; `what` goes on from its name, such as "has no field"."""
        return ConfigError(f"{self.where} {what}")


def read_lines(path: str | Path, names: Mapping[str, str] | None = None, limit: int | None = None) -> Iterator[Line]:
    """Yield the objects of a `.jsonl` or `.jsonl.gz` file, at most `limit`. Blank lines are skipped.

    `names` are those of `Line`. Raises `ConfigError` if the file cannot be read, has no lines, or has a line that is no
    JSON object.
    """
    try:
        data = Path(path).read_bytes()
        content = (gzip.decompress(data) if Path(path).suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"the data {str(path)!r} cannot be read: {reason or error}") from error
    count = 0
    # Not `splitlines`, which also splits at characters that may stand within a JSON text.
    for number, text in enumerate(io.StringIO(content, newline=None), start=1):
        if not text.strip():
            continue
        if limit is not None and count == limit:
            return
        count += 1
        yield Line(f"{path}, line {number}:", json_object(f"{path}, line {number}", text), names or {})
    if not count:
        raise ConfigError(f"the data {str(path)!r} holds no lines")


def field_names(option: str, text: str | None, fields: Collection[str]) -> dict[str, str]:
    """The names that a file has for some of the `fields` fields, by field, from "field=name,field=name".

    Raises `ConfigError` if the text has another form, and `UnknownNameError` if a field is unknown.
    """
    names = {}
    for part in text.split(",") if text else ():
        field, separator, name = (piece.strip() for piece in part.partition("="))
        if not separator or not name:
            raise ConfigError(f"{option} takes FIELD=NAME,FIELD=NAME, got {part.strip()!r}")
        check_choice("field", field, fields)
        names[field] = name
    return names
