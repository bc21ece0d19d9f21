"""Checks of policies' knobs. Each raises an error that names the setting, its value and what is allowed."""

from collections.abc import Iterable

from remask.errors import ConfigError, UnknownNameError


def interval(name: str, value: object) -> None:
    """A number of steps, at least 1."""
    if not _is_whole(value, 1):
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")


def refresh_interval(value: object) -> None:
    """A number of steps, at least 1, or None."""
    if value is not None and not _is_whole(value, 1):
        raise ConfigError(f"refresh_interval must be a whole number >= 1, or null for step 0 only, got {value!r}")


def count(name: str, value: object) -> None:
    """A number of positions, at least 0."""
    if not _is_whole(value, 0):
        raise ConfigError(f"{name} must be a whole number >= 0, got {value!r}")


def share(name: str, value: object) -> None:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number from 0 to 1, got {value!r}")


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """One of a few words."""
    if value not in (words := tuple(allowed)):
        raise UnknownNameError(name, str(value), words)


def _is_whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
