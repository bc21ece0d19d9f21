"""`--config FILE`: flags of a command from a YAML or JSON file. Flags on the command line override them."""

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from remask.errors import ConfigError, UnknownNameError

FLAG = "--config"


def expand(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """Return `argv` of a command with the flags of its `--config` file inserted before its own, which then win.

    `known` are the command's flags, dashes included. Raises `ConfigError` if the file cannot be read, or holds anything
    but an object of these flags.
    """
    path = _named(argv)
    if path is None:
        return list(argv)
    # A flag that takes several values would take a word that stands after it, too.
    own = next((index for index, word in enumerate(argv) if word.startswith("-")), len(argv))
    return [*argv[:own], *_flags(path, _load(path), known), *argv[own:]]


def _named(argv: Sequence[str]) -> str | None:
    """Return the file that the last `--config` names; None without one."""
    found = None
    for index, word in enumerate(argv):
        if word == FLAG and index + 1 < len(argv):
            found = argv[index + 1]
        elif word.startswith(f"{FLAG}="):
            found = word.removeprefix(f"{FLAG}=")
    return found


def _load(path: str) -> dict[str, Any]:
    import yaml

    try:
        # JSON is YAML. The safe loader makes plain values only.
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{FLAG}: cannot read {path!r}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{FLAG}: {path!r} must hold an object of flags, such as 'port: 8000'")
    return value


def _flags(path: str, values: dict[str, Any], known: Collection[str]) -> Iterator[str]:
    for key, value in values.items():
        name = "--" + str(key).replace("_", "-")
        if name == FLAG:
            raise ConfigError(f"{FLAG}: {path!r} names another file of flags; only one is allowed")
        if name not in known:
            raise UnknownNameError(f"flag in {path!r}", str(key), (flag.removeprefix("--") for flag in known))
        if value is None or value is False:
            raise ConfigError(f"{FLAG}: {key!r} is {value!r} in {path!r}; a flag is switched off by leaving it out")
        yield name
        if isinstance(value, list):
            yield from map(str, value)
        elif isinstance(value, dict):
            yield json.dumps(value)
        elif value is not True:
            yield str(value)
