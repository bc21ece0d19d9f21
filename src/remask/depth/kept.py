"""Depths that audits have earned, kept in the cache folder from one start to the next."""

import json
import logging
import time
from pathlib import Path

from remask.errors import RemaskError, TableError
from remask.machine.disk import cache_folder, write_whole
from remask.policies.earned import EarnedDepths

log = logging.getLogger(__name__)

VERSION = 1


def kept_file(fingerprint: str) -> Path:
    """Where the depths of a model are kept: `depth/earned-FINGERPRINT.json` in the cache folder."""
    return cache_folder() / "depth" / f"earned-{fingerprint}.json"


def load_earned(depths: EarnedDepths, fingerprint: str) -> None:
    """Let `depths` begin with those that were kept of the model. A file that cannot be used is named in a warning."""
    file = kept_file(fingerprint)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["version"] != VERSION:
            raise TableError(f"version is {raw['version']!r}, this program reads {VERSION}")
        earned = EarnedDepths.from_json(raw, depths.layers, depths.bound)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RemaskError) as error:
        log.warning("%s is not used, and depths are earned anew: %s", file, error)
        return
    depths.records = earned.records
    log.info("depths that audits had earned until %s: %s", raw.get("date"), dict(depths.lookup.entries))


def keep_earned(depths: EarnedDepths, fingerprint: str) -> None:
    """Keep `depths` for the next start. Where they cannot be written a warning says so."""
    file = kept_file(fingerprint)
    raw = {"version": VERSION, "date": time.strftime("%Y-%m-%d"), **depths.to_json()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole("earned depths", file, json.dumps(raw) + "\n", TableError)
    except (RemaskError, OSError) as error:
        log.warning("earned depths are not kept, so the next start earns them again: %s", error)
