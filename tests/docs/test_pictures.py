"""The pictures of the caches: drawn by scripts/docs_pictures.py, shown on a page, and true of what they show."""

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "docs_pictures.py"))
SCENES: dict[str, Any] = SCRIPT["SCENES"]


@pytest.mark.parametrize("name", SCENES)
def test_it_is_up_to_date(name: str) -> None:
    text = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert text == SCRIPT["svg"](SCENES[name], SCRIPT["panels"](SCENES[name])), "run: python scripts/docs_pictures.py"
    ElementTree.fromstring(text)


def test_every_picture_is_shown_and_all_that_are_shown_exist() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("how-*.md"))
    assert {path.stem for path in (ROOT / "docs" / "images").glob("how-*.svg")} == set(SCENES)
    assert all(f"](images/{name}.svg)" in pages for name in SCENES)


@pytest.mark.parametrize("name", SCENES)
def test_cells_are_the_work_that_was_counted(name: str) -> None:
    """The blue cells of a pass are its row-layers: the plan's cost, with the rows that the device chose."""
    computed = SCRIPT["COMPUTED"]
    for panel in SCRIPT["panels"](SCENES[name]):
        assert (panel.cells == computed).sum() == panel.cost
