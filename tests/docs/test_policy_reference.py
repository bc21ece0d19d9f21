"""docs/policy-reference.md: written from the docstrings, with every name that a policy's author imports."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import remask.plan
from remask.plan import View

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "policy-reference.md").read_text(encoding="utf-8")


def test_every_word_of_a_view_is_there(page: str) -> None:
    part = page.split("### `View`\n")[1].split("\n### ")[0]
    named = set(re.findall(r"^\| `(\w+)", part, re.MULTILINE))
    own = {
        name
        for name, value in vars(View).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    assert {field.name for field in fields(View)} | own == named


def test_every_class_of_plans_is_there(page: str) -> None:
    headings = set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE))
    explained = {"Mask", "Positions", "NEVER", "Widths"}  # in the text; sizes of a model
    assert set(remask.plan.__all__) - explained <= headings
