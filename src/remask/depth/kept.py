"""Depth tables that were measured because none was there, kept in the cache folder for the next start."""

import logging
from pathlib import Path

import xxhash

from remask.checkpoint.loaded import LoadedModel
from remask.depth import cuts, profile
from remask.depth.conversations import PromptSet
from remask.depth.settings import ProfileSettings
from remask.depth.table import VERSION, DepthTable
from remask.errors import RemaskError
from remask.machine.device import cache_folder

log = logging.getLogger(__name__)


def kept_file(model: LoadedModel, prompts: PromptSet) -> Path:
    """Where the table of `model` on `prompts` is kept: `depth/FINGERPRINT-HOW.json` in the cache folder.

    HOW stands for all that decides what a profile without settings measures, so a table that was measured in another
    way is not taken for this one.
    """
    how = [VERSION, ProfileSettings(), profile.FIRST_SAMPLES, profile.STILL, cuts.RATIOS, prompts.source]
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
