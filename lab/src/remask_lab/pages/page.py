"""Where the generated pages stand, and what their templates share."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from remask_lab.records.machine import processor_text
from remask_lab.records.record import Record

ROOT = Path(__file__).parents[4]
RESULTS, README = ROOT / "benchmarks" / "results", ROOT / "README.md"
NOTEBOOK = Path("docs", "lab")
"""The folder of the generated pages, from the root of a checkout."""
PAGES: Mapping[str, Path] = {
    **{name: ROOT / NOTEBOOK / f"{name}.md" for name in ("results", "real-weights")},
    "when-bicache": ROOT / "docs" / "when-bicache.md",
}


def fill(template: str, **values: Any) -> str:
    """A template of this folder, in Markdown. Blank lines that follow one another become one."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    # What is filled in is Markdown that is written here, and no HTML of others.
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined, autoescape=False)
    text = environment.get_template(f"{template}.md").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def made(record: Record) -> str:
    """On which machine, at which commit and when a record was measured."""
    about = record.about
    return f"on {processor_text(about['machine'])}, commit {about['commit']}, {about['date']}."
