"""Pages that scripts write from the code: none is older than what it tells of, and nothing in them goes unexplained."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "script"), [("commands.md", "docs_commands.py"), ("policy-reference.md", "docs_policy.py")]
)
def test_written_pages_are_up_to_date(page: str, script: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    made: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / script))
    assert text == made["page"](), f"run: python scripts/{script}"
    assert re.findall(r"^\| `.*\|  \|$", text, re.MULTILINE) == [], "something is said of every option and field"
