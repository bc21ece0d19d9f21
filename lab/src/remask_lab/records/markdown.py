"""Tables in Markdown, and in plain text for a terminal."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import TypeAlias, TypeVar

T = TypeVar("T")

SCREEN = 120
"""Characters that a line of a wide window shows."""

NONE = "-"
"""A cell of which nothing is known."""

Column: TypeAlias = tuple[str, Sequence[str]]
"""A header and the cells below it."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, aligned: bool = False) -> str:
    """The table as text. With `aligned` the cells of a column are padded to one width, for reading in a terminal."""
    if not aligned:
        return "\n".join(_line(cells) for cells in [header, ["---"] * len(header), *rows])
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    first, *others = (
        _line([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]) for row in [header, *rows]
    )
    return "\n".join([first, rule, *others])


def text_table(rows: Iterable[T], columns: Mapping[str, Callable[[T], str]]) -> str:
    """Plain text with a line for each of `rows`; `columns` make the cells under their headers.

    Columns are as wide as their longest cell; the first stands to the left, the others to the right.
    """
    lines = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justified = (
        [
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in justified)


def shown(form: str, value: float | None) -> str:
    """`value` in the format `form`, as ".2f"; `NONE` where there is none."""
    return NONE if value is None or math.isnan(value) else format(value, form)


def percent(share: float) -> str:
    """A share as "12.3 %"."""
    return f"{100 * share:.1f} %"


def narrow_tables(rows: Sequence[str], groups: Mapping[str, Sequence[Column]], width: int = SCREEN) -> str:
    """One table of all `groups` of columns beside the names of the `rows`; or several, where it is wider than `width`.

    In one table the headers of all groups but the first begin with the group's name. Else each group has tables of its
    own, which its name heads, without the rows that are empty there; only one of a single column may be wider.
    """
    (_, first), *others = groups.items()
    joined = [*first, *((f"{name}: {header}", cells) for name, group in others for header, cells in group)]
    if _width(names := ("row", rows), *joined) <= width:
        return _table(names, *joined)
    tables: list[list[Column]] = []
    for name, group in groups.items():
        filled = [any(cells[place] != NONE for _, cells in group) for place in range(len(rows))]
        names = name, list(compress(rows, filled))
        shown: list[Column] = [names]
        for header, cells in group:
            column = header, list(compress(cells, filled))
            if len(shown) > 1 and _width(*shown, column) > width:
                tables.append(shown)
                shown = [names]
            shown.append(column)
        tables += [shown] * (len(shown) > 1)
    return "\n\n".join(_table(*columns) for columns in tables)


def _table(*columns: Column) -> str:
    return markdown_table([header for header, _ in columns], list(zip(*(cells for _, cells in columns), strict=True)))


def _width(*columns: Column) -> int:
    return sum(max(map(len, [header, *cells])) + 3 for header, cells in columns) + 1


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
