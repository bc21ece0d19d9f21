"""Flags of declared classes: `--name` for each field, with its values, its meaning and its default."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from remask.checks.fields import Declared, declared
from remask.checks.values import Choice, Flag, Values, shown


def add_flags(group: argparse._ActionsContainer, cls: type[Any], **defaults: Any) -> None:
    """Add a flag for each of the declared fields of `cls`, some with `defaults` of the command's own."""
    for name, declaration in declared(cls).items():
        usual = replace(declaration, default=defaults.get(name, declaration.default))
        _add_flag(group, "--" + name.replace("_", "-"), usual)


def _add_flag(group: argparse._ActionsContainer, flag: str, declaration: Declared) -> None:
    values, default = declaration.values, declaration.default
    text = declaration.meaning.removesuffix(".").replace("%", "%%")
    if isinstance(values, Flag):
        action: Any = argparse.BooleanOptionalAction if default is None else "store_true"
        group.add_argument(flag, action=action, default=default, help=text)
        return
    usual = "" if default is None else f" (default {str(default).removesuffix('.0')})"
    group.add_argument(
        flag,
        type=from_text(values),
        choices=values.names if isinstance(values, Choice) else None,
        default=default,
        metavar=values.metavar,
        help=text + usual,
    )


def from_text(values: Values) -> Callable[[str], Any]:
    """What argparse calls with a word of the command line. Whether the value is allowed its class says later."""

    def made(text: str) -> Any:
        try:
            return values.from_text(text)
        except ValueError as error:
            message = f"expected {values.words}, as {values.metavar}, got {shown(text)}"
            raise argparse.ArgumentTypeError(message) from error

    return made
