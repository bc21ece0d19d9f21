"""The depth table of a model if none is given: one that comes with the package, one that was kept, or a new profile."""

import logging
import time
from importlib.resources import files
from pathlib import Path

import xxhash

from remask.checkpoint.loaded import LoadedModel
from remask.depth import profile as profiling
from remask.depth.conversations import PromptSet
from remask.depth.profile import Cuts, Subject, least_and_most, profile
from remask.depth.prompts import default_prompts
from remask.depth.rule import ProfileSettings
from remask.depth.table import VERSION, DepthTable, Growth
from remask.errors import RemaskError
from remask.machine.device import cache_folder

__all__ = ["DepthTable", "Growth", "find_table", "has_table", "shipped_table"]

log = logging.getLogger(__name__)

TABLES = "tables"


def find_table(llm: Subject, adapter: str | None = None) -> DepthTable:
    """Return a shipped table that fits the model, else the one that was kept of it, else profile it and keep that.

    `adapter` names the one that the model is computed with, for the log.
    """
    shipped = shipped_table(llm.loaded)
    if shipped is not None:
        log.debug("depth table of %s, which has this model's fingerprint: %s", shipped.model, shipped.source)
        return shipped
    prompts = default_prompts(llm.loaded)
    kept = kept_table(llm.loaded, prompts)
    if kept is not None:
        file = kept_file(llm.loaded, prompts)
        log.debug("depth table of an earlier start, %s (remove it to profile anew): %s", file, kept.source)
        return kept
    log.warning(
        "no depth table for the model %r%s: profiling it now, on %s, which takes %s to %s here, and keeping the table "
        "in %s for the next start. Another cache, such as none, needs no table. Make one with `remask profile --model "
        "%s --prompts FILE --output FILE`, from prompts like those to be served, and pass it as the depth table from "
        "then on.",
        llm.loaded.name,
        "" if adapter is None else f" with the adapter {adapter!r}",
        prompts.source,
        *_expected(llm, prompts),
        kept_file(llm.loaded, prompts),
        llm.loaded.name,
    )
    table = profile(llm, prompts, progress=llm.progress)
    keep_table(table, llm.loaded, prompts)
    return table


def _expected(llm: Subject, prompts: PromptSet) -> tuple[str, str]:
    """How long a profile will take at least and at most, in words: one request is measured for it."""
    settings = ProfileSettings()
    cuts = Cuts(llm, prompts, settings)
    began = time.perf_counter()
    cuts.measure(0, lambda: None)
    seconds = time.perf_counter() - began
    least, most = (_in_words(seconds * requests) for requests in least_and_most(settings))
    return least, most


def _in_words(seconds: float) -> str:
    """A time in seconds, minutes or hours."""
    unit, name = next(((u, n) for u, n in ((3600, "h"), (60, "min")) if seconds >= 2 * u), (1, "s"))
    return f"{max(1, round(seconds / unit))} {name}"


def has_table(model: LoadedModel) -> bool:
    """Whether `find_table` finds a table of `model` without profiling it."""
    if shipped_table(model) is not None:
        return True
    return model.config.kind == "masked" and kept_table(model, default_prompts(model)) is not None


def shipped_table(model: LoadedModel) -> DepthTable | None:
    """Return the shipped table of `model`; None if there is none."""
    folder = Path(str(files("remask"))) / TABLES
    return next((table for table in map(DepthTable.load, sorted(folder.glob("*.json"))) if table.fits(model)), None)


def kept_file(model: LoadedModel, prompts: PromptSet) -> Path:
    """Where the table of `model` on `prompts` is kept: `depth/FINGERPRINT-HOW.json` in the cache folder.

    HOW stands for all that decides what a profile without settings measures, so a table that was measured in another
    way is not taken for this one.
    """
    how = [VERSION, ProfileSettings(), profiling.FIRST_SAMPLES, profiling.STILL, profiling.RATIOS, prompts.source]
    return cache_folder() / "depth" / f"{model.fingerprint}-{xxhash.xxh64(repr(how).encode()).hexdigest()}.json"


def kept_table(model: LoadedModel, prompts: PromptSet) -> DepthTable | None:
    """The table that was kept of `model`; None without one. A file that cannot be used is named in a warning."""
    file = kept_file(model, prompts)
    if not file.exists():
        return None
    try:
        return DepthTable.load(file, model)
    except RemaskError as error:
        log.warning("%s is not used, and written anew once the model is profiled: %s", file, error)
        return None


def keep_table(table: DepthTable, model: LoadedModel, prompts: PromptSet) -> None:
    """Keep a table that a profile of `model` on `prompts` without settings has measured.

    Where it cannot be written a warning says so: the table itself can be used.
    """
    file = kept_file(model, prompts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        table.save(file)
    except (RemaskError, OSError) as error:
        log.warning("the depth table is not kept, so the next start profiles the model again: %s", error)
