"""The depth table of a model if none is given: one that comes with the package, or a new profile."""

import logging
from importlib.resources import files
from pathlib import Path

from remask.checkpoint.loaded import LoadedModel
from remask.depth.profile import Subject, profile
from remask.depth.prompts import default_prompts
from remask.depth.table import DepthTable, Growth

__all__ = ["DepthTable", "Growth", "find_table", "shipped_table"]

log = logging.getLogger(__name__)

TABLES = "tables"


def find_table(llm: Subject) -> DepthTable:
    """Return a shipped table that fits the model. If there is none, profile the model."""
    shipped = shipped_table(llm.loaded)
    if shipped is not None:
        how = "shape" if shipped.fingerprint is None else "fingerprint"
        log.info("depth table of %s, which has this model's %s: %s", shipped.model, how, shipped.source)
        return shipped
    prompts = default_prompts(llm.loaded)
    log.warning(
        "no depth table for the model %r: profiling it now, on %s. Make one with `remask profile --model %s --prompts "
        "FILE --output FILE`, from prompts like those to be served, and pass it as the depth table from then on.",
        llm.loaded.name,
        prompts.source,
        llm.loaded.name,
    )
    return profile(llm, prompts, progress=llm.progress)


def shipped_table(model: LoadedModel) -> DepthTable | None:
    """Return the shipped table of `model`, by fingerprint, else by shape; None if there is none."""
    folder = Path(str(files("remask"))) / TABLES
    fitting = [table for table in map(DepthTable.load, sorted(folder.glob("*.json"))) if table.fits(model)]
    return min(fitting, key=lambda table: table.fingerprint is None, default=None)
