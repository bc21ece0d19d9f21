"""Renders one chat template: a task of helper processes (`remask.machine.helper`) for `remask.text.chat_template`.

Its settings are the template, the variables that all conversations share, and the maximal length; a question is one
conversation, and the answer its rendered text. Input is encoded by `marshal`, which is the fastest to read.
"""

import json
import marshal
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from remask.machine.helper import Answers, FailedError, RefusedError


class _GenerationBlock(Extension):
    """The block `{% generation %}`, which templates put around the assistant's words. It renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _SafeNamespace(Namespace):
    """The object of `namespace()`. Names with a leading underscore are refused, as Python uses some of them."""

    def __init__(*args: Any, **values: Any) -> None:
        Namespace.__init__(*args, **values)
        for name in dict(*args[1:], **values):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, such as {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(time_format: str) -> str:
    return datetime.now().strftime(time_format)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(text: str) -> Template:
    """The template, with the functions, filters and blocks that chat templates of the hub may use.

    Raises `jinja2.TemplateSyntaxError` if the text is not a valid template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_SafeNamespace)
    return environment.from_string(text)


def render(template: Template, variables: Mapping[str, Any], max_length: int) -> str:
    """The text that a template writes for these variables.

    Raises `FailedError` as soon as it has more than `max_length` characters, and the errors of the template itself.
    """
    chunks = []
    length = 0
    for chunk in template.generate(variables):
        length += len(chunk)
        if length > max_length:
            raise FailedError(f"it writes more than {max_length} characters")
        chunks.append(chunk)
    return "".join(chunks)


def renderer(settings: bytes) -> Answers:
    """The function that renders conversations. The first one compiles the template, within its limits."""
    job = marshal.loads(settings)
    template: Template | None = None

    def answer(conversation: bytes) -> bytes:
        nonlocal template
        try:
            template = template or compile_template(job["template"])
            text = render(template, {**job["variables"], **marshal.loads(conversation)}, job["max_length"])
        except TemplateError as error:
            raise RefusedError(str(error)) from error
        except RecursionError as error:
            raise FailedError("it calls itself too often") from error
        return text.encode("utf-8", "surrogatepass")

    return answer
