"""Tables in Markdown."""

from collections.abc import Sequence


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


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
