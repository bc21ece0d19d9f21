"""The design page names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "remask"


def test_files_and_rooms_that_the_design_names_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    named |= {name for name in re.findall(r"`((?:\w+/)+\w+)`", text) if name.split("/")[0] in rooms}
    assert len(named) > 40
    assert [name for name in sorted(named) if not any((base / name).exists() for base in (PACKAGE, ROOT))] == []
