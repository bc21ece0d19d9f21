"""Writes docs/policy-reference.md from the docstrings of remask: `python scripts/docs_policy.py`.

Of a class it has the docstring, the fields with what the docstring or the comment behind them says, and its own public
methods and properties with the first paragraph of their docstrings.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remask.plan import HookCost, LastPass, LayerHook, Plan, PrefixHit, Span, Spans, StepFacts, TopRho, View, rows_of
from remask.plan.cost import OperationCost
from remask.policies import CachePolicy, DepthLookup, RequestFacts, Schedule, Traits
from remask.policies.on_device import Changed, DeviceHook, Hooked
from remask.readers import Asked, DeviceRead, Predicted, Reader, ReadPass, Start

PAGE = Path(__file__).parents[1] / "docs" / "policy-reference.md"
HEAD = """# The policy author's reference

All that whoever writes a [cache policy](your-cache.md) is shown and may answer, from the docstrings of the source
(`python scripts/docs_policy.py` writes this page). A policy is a subclass of [`CachePolicy`](#cachepolicy) with a
method `plan`. It gets a [`View`](#view) of a request before each pass, and returns the [`Plan`](#plan) of that pass,
which is made of [`Span`s](#span): runs of layers, with the rows that are computed in them.

T is the number of positions of the canvas (prompt and response), which count from 0; layers count from 0 too. A `Mask`
is a NumPy array of bool with T entries, `Positions` an ascending one of int64. `True` in a mask of rows means:
this row.

"""
SECTIONS: dict[str, tuple[Any, ...]] = {
    "What a policy is shown": (View, PrefixHit, StepFacts, LastPass),
    "What a policy answers": (Plan, Span, Spans, TopRho, rows_of),
    "The policy itself": (CachePolicy, Traits, Schedule, RequestFacts, DepthLookup),
    "Between layers": (LayerHook, HookCost, OperationCost, DeviceHook, Hooked, Changed),
    "Readers": (Reader, Asked, Start, ReadPass, Predicted, DeviceRead),
}
_ATTRIBUTES = re.compile(r"\n*^(?:Attributes|Args):\n((?:[ ]{4}.*\n?|\n)+)", re.MULTILINE)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, objects in SECTIONS.items():
        parts.append(f"## {title}\n\n")
        parts += [section(each) for each in objects]
    return "".join(parts).rstrip("\n") + "\n"


def section(item: Any) -> str:
    """What stands about a class or a function."""
    text = inspect.getdoc(item) or ""
    if not inspect.isclass(item):
        return f"### `{item.__name__}`\n`{item.__module__}.{item.__name__}`: {marked(text)}\n\n"
    told = _ATTRIBUTES.sub("\n", text).strip()
    lines = [f"### `{item.__name__}`\n", f"From `{item.__module__}`. {marked(told)}\n"]
    if rows := [*fields(item, text)]:
        lines += ["\n| field | type | meaning |\n|---|---|---|\n", *rows]
    if rows := [*methods(item)]:
        lines += ["\n| method or property | meaning |\n|---|---|\n", *rows]
    return "".join(lines) + "\n"


def fields(item: type[Any], text: str) -> Iterator[str]:
    """A row for each field of its own."""
    source = inspect.getsource(item)
    lines = textwrap.dedent(source).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    found = _ATTRIBUTES.search(text)
    entries = textwrap.dedent(found[1]) if found else ""
    meanings: dict[str, str] = {}
    for names, said in re.findall(r"^(\w+(?:, \w+)*): ((?:.*\n?)(?:[ ]+.*\n?)*)", entries, re.MULTILINE):
        meanings |= dict.fromkeys(names.split(", "), " ".join(said.split()))
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        if name.startswith("_"):
            continue
        _, _, comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
        said = meanings.get(name) or comment
        kind = cell(ast.unparse(node.annotation).strip("'"))
        yield f"| `{name}` | `{kind}` | {cell(marked(said))} |\n"


def methods(item: type[Any]) -> Iterator[str]:
    """A row for each public method and property of its own."""
    shown = {field.name for field in dataclasses.fields(item)} if dataclasses.is_dataclass(item) else set()
    for name, value in vars(item).items():
        function = value
        if isinstance(value, property):
            function = value.fget
        elif isinstance(value, classmethod | staticmethod):
            function = value.__func__
        elif not inspect.isfunction(value):
            function = getattr(value, "func", None)  # a cached property
        if name.startswith("_") or name in shown or not inspect.isfunction(function):
            continue
        words = (inspect.getdoc(function) or "").split("\n\n")[0]
        call = "" if function is not value else f"({', '.join([*inspect.signature(function).parameters][1:])})"
        yield f"| `{name}{call}` | {cell(marked(words))} |\n"


def marked(text: str) -> str:
    """`text` of a docstring as Markdown: what looks like HTML or a link there is text."""
    return re.sub(r"(?<!`)\[(?=[A-Z])", r"\\[", text).replace("<", "&lt;")


def cell(text: str) -> str:
    """`text` in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
