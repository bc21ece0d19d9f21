"""What a checkpoint holds, whichever form it has: a folder of safetensors files, or one GGUF file.

All other code of loading asks here for its shape and its tensors.
"""

from pathlib import Path
from typing import Any

from remask.checkpoint.gguf_tensors import locate
from remask.checkpoint.json_files import read_json
from remask.checkpoint.weight_files import TensorLocation, tensor_locations
from remask.families import Family, family_of
from remask.gguf.architecture import config_object, family_in
from remask.gguf.header import is_gguf, read_header

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
        UnknownNameError, PluginError: as `remask.families.family_of`.
    """
    raw = raw_config(checkpoint)
    return (family_in(raw) if is_gguf(checkpoint) else family_of(raw)), raw


def tensors(checkpoint: Path) -> dict[str, TensorLocation]:
    """Every tensor in the files of a checkpoint by its name; no weight is read.

    Raises:
        CheckpointError: a file is missing, truncated, corrupt or unreadable.
    """
    return locate(checkpoint) if is_gguf(checkpoint) else tensor_locations(checkpoint)
