"""The depths that a model begins with: of a table that `remask profile` saved, of a shipped one, or earned by audits.

Saved tables and earned depths are files in the folder `depth` of the cache folder.
"""

import json
import logging
import time
from importlib.resources import files
from pathlib import Path

from remask.checkpoint.loaded import LoadedModel
from remask.depth.table import DepthTable
from remask.errors import RemaskError, TableError
from remask.machine.disk import cache_folder, write_whole
from remask.policies.earned import EarnedDepths

log = logging.getLogger(__name__)

TABLES = "tables"
EARNED_VERSION = 1


def find_table(model: LoadedModel) -> DepthTable | None:
    """The saved table of `model`, else its shipped one; None if there is neither."""
    table = load_saved_table(model)
    if table is not None:
        log.debug("depth table in %s (remove it to be without): %s", table_file(model), table.source)
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


def table_file(model: LoadedModel) -> Path:
    """The file of the saved table of `model`, which need not exist."""
    return cache_folder() / "depth" / f"{model.fingerprint}.json"


def load_saved_table(model: LoadedModel) -> DepthTable | None:
    """The saved table of `model`; None if there is none. If it cannot be used, logs a warning and returns None."""
    file = table_file(model)
    if not file.exists():
        return None
    try:
        return DepthTable.load(file, model)
    except TableError as error:
        log.warning("%s is not used: %s", file, error)
        return None


def save_table(table: DepthTable, model: LoadedModel) -> Path:
    """Save a table for later starts of `model`, and return its file. Raises `TableError` if it cannot be written."""
    file = table_file(model)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TableError(f"the folder {str(file.parent)!r} cannot be made: {error.strerror}; give --output") from error
    table.save(file)
    return file


def earned_file(fingerprint: str) -> Path:
    """The file of the depths that audits of a model have earned."""
    return cache_folder() / "depth" / f"earned-{fingerprint}.json"


def load_earned(depths: EarnedDepths, fingerprint: str) -> None:
    """Replace the records of `depths` by the saved ones, if any. Logs a warning if the file cannot be used."""
    file = earned_file(fingerprint)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["version"] != EARNED_VERSION:
            raise TableError(f"version is {raw['version']!r}, this program reads {EARNED_VERSION}")
        earned = EarnedDepths.from_json(raw, depths.layers, depths.bound)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RemaskError) as error:
        log.warning("%s is not used, and depths are earned anew: %s", file, error)
        return
    depths.records = earned.records
    log.info("depths that audits had earned until %s: %s", raw.get("date"), dict(depths.lookup.entries))


def save_earned(depths: EarnedDepths, fingerprint: str) -> None:
    """Save `depths` for the next start. Logs a warning if they cannot be written."""
    file = earned_file(fingerprint)
    raw = {"version": EARNED_VERSION, "date": time.strftime("%Y-%m-%d"), **depths.to_json()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole("earned depths", file, json.dumps(raw) + "\n", TableError)
    except (RemaskError, OSError) as error:
        log.warning("earned depths are not saved, so the next start earns them again: %s", error)
