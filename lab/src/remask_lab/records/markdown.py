"""Tables in Markdown, and in plain text for a terminal."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import TypeAlias, TypeVar

T = TypeVar("T")

SCREEN = 120
"""Characters in a line of a wide window."""

NONE = "-"
"""The text of a cell without a value."""

Column: TypeAlias = tuple[str, Sequence[str]]
"""A header and the cells below it."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, aligned: bool = False) -> str:
    """The table as text. With `aligned` the cells of a column are padded to one width, for reading in a terminal."""
    if not aligned:
        return "\n".join(_line(cells) for cells in [header, ["---"] * len(header), *rows])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    lines = [_line([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]) for row in [header, *rows]]
    return "\n".join([lines[0], rule, *lines[1:]])


def text_table(rows: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> str:
    """Plain text with a header and a line for each of `rows`; `columns` maps a header to what makes a row's cell.

    Columns are as wide as their longest cell; the first is aligned left, the others right.
    """
    lines = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justified = (
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in justified)


def number_text(form: str, value: float | None) -> str:
    """`value` in the format `form`, such as ".2f"; `NONE` for None and NaN."""
    return NONE if value is None or math.isnan(value) else format(value, form)


def percent(share: float) -> str:
    """A share as "12.3 %"."""
    return f"{100 * share:.1f} %"


def narrow_tables(rows: Sequence[str], groups: Mapping[str, Sequence[Column]], width: int = SCREEN) -> str:
    """Markdown of all `groups` of columns, beside a column with the names of the `rows`: one table if it fits `width`.

    Its headers begin with the name of their group, but for the first group. Otherwise each group gets tables of its
    own, whose first header is the group's name, without the rows that are empty in all its columns. Each has as many
    columns as fit `width` characters, and at least one.
    """
    (_, unnamed), *others = groups.items()
    columns = [*unnamed, *((f"{name}: {header}", cells) for name, group in others for header, cells in group)]
    if _width(names := ("row", rows), *columns) <= width:
        return _table(names, *columns)
    tables: list[str] = []
    for name, group in groups.items():
        filled = [any(cells[place] != NONE for _, cells in group) for place in range(len(rows))]
        names = name, list(compress(rows, filled))
        columns = []
        for header, cells in group:
            column = header, list(compress(cells, filled))
            if columns and _width(names, *columns, column) > width:
                tables.append(_table(names, *columns))
                columns = []
            columns.append(column)
        tables += [_table(names, *columns)] if columns else []
    return "\n\n".join(tables)


def _table(*columns: Column) -> str:
    return markdown_table([header for header, _ in columns], list(zip(*(cells for _, cells in columns), strict=True)))


def _width(*columns: Column) -> int:
    """Characters of a line of the aligned table, with its borders."""
    return sum(max(map(len, [header, *cells])) + 3 for header, cells in columns) + 1


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
