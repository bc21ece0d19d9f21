"""Checks of values that users give. Each raises `ConfigError` naming the field, the value and what is allowed."""

import json
import math
from collections.abc import Sequence
from typing import Any

from remask.errors import ConfigError

LARGEST = 2**63 - 1


def whole(name: str, value: object, low: int, *, optional: bool = False) -> None:
    """A whole number of at least `low`; `optional` allows None."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= LARGEST:
        raise ConfigError(f"{name} must be a whole number from {low} to 2**63 - 1, got {value!r}")


def real(
    name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False, optional: bool = False
) -> None:
    """A finite number from `low` (or `above` it) to `high`; `optional` allows None."""
    if value is None and optional:
        return
    fits = not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high
    # Whole numbers from JSON may exceed what a float can hold.
    if not fits or (above and value == low) or (isinstance(value, int) and value > LARGEST) or not math.isfinite(value):
        bounds = f"a number {'above' if above else 'from'} {low:g}" + (f" to {high:g}" if high < math.inf else " up")
        raise ConfigError(f"{name} must be {bounds}, got {value!r}")


def listed(name: str, value: object, of: str) -> Sequence[Any]:
    """A list or tuple; `of` says of what."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list of {of}, got {value!r}")
    return value


def json_object(what: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`; `what` names it in errors."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value
