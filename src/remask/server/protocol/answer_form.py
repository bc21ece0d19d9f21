"""The form of an answer, as OpenAI's `response_format` asks for it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from remask.errors import ConfigError
from remask.request.forms import StructuredOutputs
from remask.server.protocol.base import MAX_KEYWORDS, Body, LongText, Name


class JsonSchema(Body):
    """A schema that an answer follows. `name` and `description` say what it is for; an answer is always `strict`."""

    name: Name | None = None
    description: LongText | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema", max_length=MAX_KEYWORDS)]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for the form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def form(self) -> StructuredOutputs | None:
        """The form, None for any text. Raises `ConfigError` on a schema that is missing or cannot be guaranteed."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ConfigError("response_format: json_schema and the type 'json_schema' go together")
        if self.type == "text":
            return None
        if self.json_schema is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=self.json_schema.schema_)
