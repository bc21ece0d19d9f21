"""The paths of the generated pages, and what their templates share."""

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
"""The folder of most generated pages, relative to the root of a checkout."""
PAGES: Mapping[str, Path] = {
    **{name: ROOT / NOTEBOOK / f"{name}.md" for name in ("results", "real-weights")},
    "when-bicache": ROOT / "docs" / "when-bicache.md",
}


def fill(template: str, **values: Any) -> str:
    """The Markdown of `templates/TEMPLATE.md` with `values`. Several blank lines in a row become one."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    # Values are Markdown that the laboratory writes, and no HTML of others.
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined, autoescape=False)
    text = environment.get_template(f"{template}.md").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def origin_text(record: Record) -> str:
    """The machine, the commit and the date of a measurement, as the end of a sentence."""
    about = record.about
    return f"on {processor_text(about['machine'])}, commit {about['commit']}, {about['date']}."
