"""Declared fields as fields of request bodies: checked by their declarations, described in the OpenAPI document."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from remask.checks.fields import Declared, declared

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Checked:
    """Makes pydantic check the field `name` of a body as its declaration says. Null leaves the field out."""

    name: str
    declaration: Declared

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = {"anyOf": [self.declaration.values.schema(), {"type": "null"}]}
        return {**schema, "description": self.declaration.described}

    def _checked(self, value: object) -> object:
        if value is not None:
            return self.declaration.values.made(self.name, value)
        return None


def with_declared(*classes: type[Any]) -> Callable[[type[B]], type[B]]:
    """Return a decorator that adds the declared fields of `classes` to a body, each None where it is left out."""
    definitions: dict[str, Any] = {
        name: (Annotated[Any, Checked(name, declaration)], Field(default=None))
        for cls in classes
        for name, declaration in declared(cls).items()
    }

    def add(body: type[B]) -> type[B]:
        return create_model(
            body.__name__, __base__=body, __doc__=body.__doc__, __module__=body.__module__, **definitions
        )

    return add


def given(body: BaseModel, cls: type[Any]) -> dict[str, Any]:
    """The declared fields of `cls` that `body` sets, by name."""
    values = ((name, getattr(body, name)) for name in declared(cls))
    return {name: value for name, value in values if value is not None}
