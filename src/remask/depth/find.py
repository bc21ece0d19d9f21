"""The depth table of a model if none is given: one that comes with the package, one that was kept, or a new profile."""

import logging
from importlib.resources import files
from pathlib import Path

from remask.checkpoint.loaded import LoadedModel
from remask.depth.kept import keep_table, kept_file, kept_table
from remask.depth.profile import Subject, profile
from remask.depth.prompts import default_prompts
from remask.depth.table import DepthTable, Growth

__all__ = ["DepthTable", "Growth", "find_table", "has_table", "shipped_table"]

log = logging.getLogger(__name__)

TABLES = "tables"


def find_table(llm: Subject) -> DepthTable:
    """Return a shipped table that fits the model, else the one that was kept of it, else profile it and keep that."""
    shipped = shipped_table(llm.loaded)
    if shipped is not None:
        how = "shape" if shipped.fingerprint is None else "fingerprint"
        log.info("depth table of %s, which has this model's %s: %s", shipped.model, how, shipped.source)
        return shipped
    prompts = default_prompts(llm.loaded)
    kept = kept_table(llm.loaded, prompts)
    if kept is not None:
        file = kept_file(llm.loaded, prompts)
        log.info("depth table of an earlier start, %s (remove it to profile anew): %s", file, kept.source)
        return kept
    log.warning(
        "no depth table for the model %r: profiling it now, on %s, and keeping the table in %s for the next start. "
        "Make one with `remask profile --model %s --prompts FILE --output FILE`, from prompts like those to be served, "
        "and pass it as the depth table from then on.",
        llm.loaded.name,
        prompts.source,
        kept_file(llm.loaded, prompts),
        llm.loaded.name,
    )
    table = profile(llm, prompts, progress=llm.progress)
    keep_table(table, llm.loaded, prompts)
    return table


def has_table(model: LoadedModel) -> bool:
    """Whether `find_table` finds a table of `model` without profiling it."""
    if shipped_table(model) is not None:
        return True
    return model.config.kind == "masked" and kept_table(model, default_prompts(model)) is not None


def shipped_table(model: LoadedModel) -> DepthTable | None:
    """Return the shipped table of `model`, by fingerprint, else by shape; None if there is none."""
    folder = Path(str(files("remask"))) / TABLES
    fitting = [table for table in map(DepthTable.load, sorted(folder.glob("*.json"))) if table.fits(model)]
    return min(fitting, key=lambda table: table.fingerprint is None, default=None)
