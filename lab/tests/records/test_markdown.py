import pytest

from remask_lab.records.markdown import SCREEN, narrow_tables

NAMES = ["a", "b"]


def columns(count: int, width: int) -> list[tuple[str, list[str]]]:
    return [(f"c{number}", ["x" * width, "y"]) for number in range(count)]


def test_one_table_where_it_fits() -> None:
    text = narrow_tables(NAMES, {"published": [("X", ["1", "2"])], "ours": [("X", ["3", "4"])]})
    assert text.splitlines() == ["| row | X | ours: X |", "| --- | --- | --- |", "| a | 1 | 3 |", "| b | 2 | 4 |"]


@pytest.mark.parametrize(("count", "width"), [(3, 30), (9, 30), (2, 59), (12, 7)])
def test_no_table_is_too_wide_and_no_column_is_lost(count: int, width: int) -> None:
    text = narrow_tables(NAMES, {"published": columns(count, width), "ours": columns(count, width)})
    tables = text.split("\n\n")
    assert max(map(len, text.splitlines())) <= SCREEN
    heads = [table.splitlines()[0].strip("| ").split(" | ") for table in tables]
    for name in ("published", "ours"):
        assert [cell for first, *rest in heads if first == name for cell in rest] == [f"c{n}" for n in range(count)]
    assert all(len(table.splitlines()) == 4 for table in tables)


def test_a_column_that_is_too_wide_by_itself_has_a_table() -> None:
    text = narrow_tables(NAMES, {"published": columns(2, SCREEN), "ours": []})
    assert [table.splitlines()[0] for table in text.split("\n\n")] == ["| published | c0 |", "| published | c1 |"]
