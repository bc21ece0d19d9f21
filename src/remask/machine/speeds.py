"""How fast models answered on this machine: commands store it in the cache folder, and `remask models` lists it."""

import json
import logging
import time
from pathlib import Path

from remask.errors import OutputError
from remask.machine.disk import cache_folder, write_whole

log = logging.getLogger(__name__)


def speeds_file() -> Path:
    """The file of speeds: `speeds.json` in the cache folder."""
    return cache_folder() / "speeds.json"


def read_speeds() -> dict[str, float]:
    """Tokens per second of each model's last answer, by the name that started the model.

    If the file cannot be read, logs a warning and returns an empty dictionary.
    """
    try:
        speeds = json.loads(speeds_file().read_text(encoding="utf-8"))
        return {name: float(speed["tokens"] / speed["seconds"]) for name, speed in speeds.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        log.warning("%s is not used, as it cannot be read: %s", speeds_file(), error)
        return {}


def store_speed(model: str, tokens: int, seconds: float) -> None:
    """Store how fast a single request to `model` was answered. Logs a warning if the file cannot be written."""
    if not tokens or not seconds:
        return
    file = speeds_file()
    try:
        speeds = json.loads(file.read_text(encoding="utf-8")) if read_speeds() else {}
        speeds[model] = {"tokens": tokens, "seconds": seconds, "date": time.strftime("%Y-%m-%d")}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole("the speeds of models", file, json.dumps(speeds, indent=1) + "\n")
    except (OSError, OutputError) as error:
        log.warning("the speed of %s is not kept: %s", model, error)
