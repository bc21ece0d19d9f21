"""Reads the small JSON files of a checkpoint folder."""

import json
from pathlib import Path
from typing import Any

from remask.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: the file is missing, cannot be read, is not JSON, or is not an object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist. A checkpoint folder in the Hugging Face layout holds it; check the path, "
            "or download the model again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}). It may be truncated: download it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a JSON {type(raw).__name__} where an object is expected.")
    return raw
