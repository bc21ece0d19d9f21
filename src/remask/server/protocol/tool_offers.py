"""Tools that a request offers, and which of them the answer calls."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from remask.checks.fields import Declared
from remask.checks.values import Settings
from remask.server.declared import Checked
from remask.server.protocol.base import MAX_KEYWORDS, Body, LongText, Name

MAX_TOOLS = 128
PARAMETERS = Declared(Settings("keywords of JSON Schema", MAX_KEYWORDS), None, "A JSON schema of the arguments.")

ToolName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", max_length=64)]
Parameters: TypeAlias = Annotated[dict[str, Any] | None, Checked("tools: parameters", PARAMETERS)]


class Function(Body):
    """A function that the model may call. `parameters` is a JSON schema; forced calls always follow it."""

    name: ToolName
    description: LongText | None = None
    parameters: Parameters = None
    strict: bool | None = None


class ToolOffer(Body):
    """A tool of a request. Functions are the only kind."""

    type: Literal["function"]
    function: Function

    @property
    def rendered(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        kept = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": self.type, "function": {"parameters": {"type": "object", "properties": {}}} | kept}


class ChosenFunction(Body):
    """The name of the function to call."""

    name: Name


class ChosenTool(Body):
    """The tool that the answer calls."""

    type: Literal["function"]
    function: ChosenFunction
