"""The depth table of a model where none is given: one that `remask profile` kept, or a shipped one."""

import logging
from importlib.resources import files
from pathlib import Path

from remask.checkpoint.loaded import LoadedModel
from remask.depth.table import DepthTable
from remask.errors import TableError
from remask.machine.disk import cache_folder

log = logging.getLogger(__name__)

TABLES = "tables"


def find_table(model: LoadedModel) -> DepthTable | None:
    """The table that was kept of `model`, else a shipped one; None without one: its depths are earned."""
    table = kept_table(model)
    if table is not None:
        log.debug("depth table in %s (remove it to be without): %s", kept_file(model), table.source)
        return table
    table = shipped_table(model)
    if table is not None:
        log.debug("depth table that comes with the package: %s", table.source)
    return table


def shipped_table(model: LoadedModel) -> DepthTable | None:
    """The shipped table of `model`; None if there is none."""
    folder = Path(str(files("remask"))) / TABLES
    tables = map(DepthTable.load, sorted(folder.glob("*.json")))
    return next((table for table in tables if table.fingerprint == model.fingerprint), None)


def kept_file(model: LoadedModel) -> Path:
    """Where the table of `model` is kept: `depth/FINGERPRINT.json` in the cache folder."""
    return cache_folder() / "depth" / f"{model.fingerprint}.json"


def kept_table(model: LoadedModel) -> DepthTable | None:
    """The table that was kept of `model`; None without one. A file that cannot be used is named in a warning."""
    file = kept_file(model)
    if not file.exists():
        return None
    try:
        return DepthTable.load(file, model)
    except TableError as error:
        log.warning("%s is not used: %s", file, error)
        return None


def keep_table(table: DepthTable, model: LoadedModel) -> Path:
    """Keep a table for all further starts of `model`, and return its file. Raises `TableError` where it cannot."""
    file = kept_file(model)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TableError(f"the folder {str(file.parent)!r} cannot be made: {error.strerror}; give --output") from error
    table.save(file)
    return file
