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
    """Add a flag for each of the declared fields of `cls`, or for those in `names`.

    `defaults` replace the declared ones, by field name.
    """
    for name, declaration in declared(cls).items():
        if (names is None or name in names) and declaration.flags != ():
            _add_flag(group, name, replace(declaration, default=defaults.get(name, declaration.default)))


def _add_flag(group: argparse._ActionsContainer, name: str, declaration: Declared) -> None:
    """Add the flag of the field `name`, whose help ends with its default.

    The flag of a boolean sets it to the other value than its default, or has a `--no-` form if the default is None.
    """
    values = declaration.values
    default = declaration.default
    flags = declaration.flags or ("--" + name.replace("_", "-"),)
    text = declaration.meaning.removesuffix(".").replace("%", "%%")
    if isinstance(values, Flag):
        action: Any = "store_false" if default else "store_true"
        if default is None:
            action = argparse.BooleanOptionalAction
        text = f"do not {text[0].lower()}{text[1:]}" if default else text
        group.add_argument(*flags, dest=name, action=action, default=default, help=text)
        return
    options: dict[str, Any] = {"nargs": "+"} if isinstance(values, TextsByName) else {"type": value_parser(values)}
    if isinstance(values, Choice):
        options["choices"] = values.names
    shown_default = f"{default:g}" if isinstance(default, float) else str(default).replace("%", "%%")
    default_text = "" if default is None else f" (default {shown_default})"
    metavar = declaration.metavar or values.metavar
    group.add_argument(*flags, dest=name, default=default, metavar=metavar, help=text + default_text, **options)


def value_parser(values: Values) -> Callable[[str], Any]:
    """Return the function that argparse calls to parse a word. The class of the field checks the value's range later.

    It raises `argparse.ArgumentTypeError` on a word that cannot be parsed.
    """

    def parse_value(text: str) -> Any:
        if isinstance(values, Settings):
            return text  # parsed later, where the error names the field within
        try:
            return values.from_text(text)
        except ValueError as error:
            message = f"expected {values.words}, as {values.metavar}, got {shown(text)}"
            raise argparse.ArgumentTypeError(message) from error

    return parse_value
