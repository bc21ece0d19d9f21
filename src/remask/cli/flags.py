"""Flags of declared classes: `--name` for each field, with its values, its meaning and its default."""

import argparse
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from remask.checks.fields import Declared, declared
from remask.checks.values import Choice, Flag, Settings, TextsByName, Values, shown


def add_flags(
    group: argparse._ActionsContainer, cls: type[Any], names: Collection[str] | None = None, **defaults: Any
) -> None:
    """Add a flag for each of the declared fields of `cls`, or of those that are named.

    Some have `defaults` of the command's own.
    """
    for name, declaration in declared(cls).items():
        if (names is None or name in names) and declaration.flags != ():
            _add_flag(group, name, replace(declaration, default=defaults.get(name, declaration.default)))


def _add_flag(group: argparse._ActionsContainer, name: str, declaration: Declared) -> None:
    values, default = declaration.values, declaration.default
    flags = declaration.flags or ("--" + name.replace("_", "-"),)
    text = declaration.meaning.removesuffix(".").replace("%", "%%")
    if isinstance(values, Flag):
        usual: Any = {None: argparse.BooleanOptionalAction, False: "store_true", True: "store_false"}[default]
        text = f"do not {text[0].lower()}{text[1:]}" if default else text
        group.add_argument(*flags, dest=name, action=usual, default=default, help=text)
        return
    more: dict[str, Any] = {"nargs": "+"} if isinstance(values, TextsByName) else {"type": from_text(values)}
    if isinstance(values, Choice):
        more["choices"] = values.names
    usual = "" if default is None else f" (default {str(default).removesuffix('.0')})"
    metavar = declaration.metavar or values.metavar
    group.add_argument(*flags, dest=name, default=default, metavar=metavar, help=text + usual, **more)


def from_text(values: Values) -> Callable[[str], Any]:
    """What argparse calls with a word of the command line. Whether the value is allowed its class says later."""

    def made(text: str) -> Any:
        if isinstance(values, Settings):
            return text  # of which an error says more once it is read
        try:
            return values.from_text(text)
        except ValueError as error:
            message = f"expected {values.words}, as {values.metavar}, got {shown(text)}"
            raise argparse.ArgumentTypeError(message) from error

    return made
