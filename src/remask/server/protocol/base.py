"""What all bodies are made of: a strict object, and texts, names and token ids that have a bound."""

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from remask.checks.values import LARGEST
from remask.server.limits import MAX_ITEMS

MAX_KEYWORDS = 64  # of the outermost level of a JSON schema
MAX_TOKEN_IDS = 1 << 20
MAX_NAME = 1024  # characters of a name that somebody chose: of a model, a user, a call
MAX_TEXT = 1 << 24  # characters of any text; the server's own limits are below it

# The first item that does not fit ends the check: a list may hold a million of them.
Count: TypeAlias = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
TokenIds: TypeAlias = Annotated[list[Count], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Name: TypeAlias = Annotated[str, Field(max_length=MAX_NAME)]
LongText: TypeAlias = Annotated[str, Field(max_length=MAX_TEXT)]
Texts: TypeAlias = Annotated[list[LongText], Field(max_length=MAX_ITEMS, fail_fast=True)]
TokenLists: TypeAlias = Annotated[list[TokenIds], Field(max_length=MAX_ITEMS, fail_fast=True)]


class Body(BaseModel):
    """A body with strict JSON types (no text for numbers), without unknown fields and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
