"""How fast models answered on this machine: commands keep it in the cache folder, and `remask models` lists it."""

import json
import logging
import time
from pathlib import Path

from remask.errors import OutputError
from remask.machine.disk import cache_folder, write_whole

log = logging.getLogger(__name__)


def kept_file() -> Path:
    """Where speeds are kept: `speeds.json` in the cache folder."""
    return cache_folder() / "speeds.json"


def measured() -> dict[str, float]:
    """Tokens a second of the last answer, by the name that started the model. A file that cannot be read has none."""
    try:
        speeds = json.loads(kept_file().read_text(encoding="utf-8"))
        return {name: float(speed["tokens"] / speed["seconds"]) for name, speed in speeds.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        log.warning("%s is not used, as it cannot be read: %s", kept_file(), error)
        return {}


def keep(model: str, tokens: int, seconds: float) -> None:
    """Keep how fast one request of `model` was answered alone; where that cannot be written a warning says so."""
    if not tokens or not seconds:
        return
    file = kept_file()
    try:
        speeds = json.loads(file.read_text(encoding="utf-8")) if measured() else {}
        speeds[model] = {"tokens": tokens, "seconds": seconds, "date": time.strftime("%Y-%m-%d")}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole("the speeds of models", file, json.dumps(speeds, indent=1) + "\n")
    except (OSError, OutputError) as error:
        log.warning("the speed of %s is not kept: %s", model, error)
