"""What a checkpoint holds, whichever form it has: a folder of safetensors files, or one GGUF file.

All other code of loading asks here for its shape and its tensors.
"""

from pathlib import Path
from typing import Any

from remask.models.checkpoint import TensorLocation, tensor_locations
from remask.models.families import Family, family_of
from remask.models.files import read_json
from remask.models.gguf.architecture import config_object, family_in
from remask.models.gguf.header import is_gguf, read_header
from remask.models.gguf.tensors import locate

CONFIG = "config.json"


def description(checkpoint: Path) -> str:
    """What of a checkpoint says which shape it has, for messages."""
    return "header" if is_gguf(checkpoint) else CONFIG


def raw_config(checkpoint: Path) -> dict[str, Any]:
    """The object in `config.json`, or what it would be for a GGUF file. Raises `CheckpointError`."""
    return config_object(read_header(checkpoint)) if is_gguf(checkpoint) else read_json(checkpoint / CONFIG)


def family_and_config(checkpoint: Path) -> tuple[Family, dict[str, Any]]:
    """The family of a checkpoint, whose `names` are those of its tensors, and the object that the family reads.

    Raises:
        CheckpointError: as `raw_config`.
        UnknownNameError, PluginError: as `remask.models.families.family_of`.
    """
    raw = raw_config(checkpoint)
    return (family_in(raw) if is_gguf(checkpoint) else family_of(raw)), raw


def tensors(checkpoint: Path) -> dict[str, TensorLocation]:
    """Every tensor in the files of a checkpoint by its name; no weight is read.

    Raises:
        CheckpointError: a file is missing, truncated, corrupt or unreadable.
    """
    return locate(checkpoint) if is_gguf(checkpoint) else tensor_locations(checkpoint)
